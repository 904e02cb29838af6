// The calculator: settings, and a bar a way.
function start(root, data) {
  const {el} = kit, model = fitModel(data), first = data.state;
  const COLORS = {memory: "var(--x-memory)", untimed: "var(--x-untimed)", time: "var(--x-time)", validity: "var(--x-wrong)", search: "var(--x-none)"};
  const WORDS = {memory: "memory", untimed: "memory (time not modelled)", time: "time", validity: "wrong results beyond", search: "search ends there"};
  const {points, equal, worst, fitted} = data.checked, NOTE =
    `Predicted. Bytes are those of the traced programs through torch's allocator, with the CUDA context. Of ${points} `
    + `traces that they were not made from, ${kit.percent(equal)} are equal to the byte and the others at most `
    + `${kit.percent(worst)} off. Where work is done in pieces (LongNet, FlashAttention-4's gradients) and for windows `
    + `over several cards they are fitted: at most ${kit.percent(fitted)} off from four GiB on. Not predicted are `
    + `LongNet by torch's kernels, which "workbench fit" traces, and dense attention over several cards, whose plan `
    + `changes with N and heads. Time is that of attention alone, modelled from what an H100 reached (FlashAttention-4: `
    + `an H200), as a share of the card's peak; not modelled over several cards. A training step of so many blocks `
    + `(layer norm, projections, attention, layer norm, an MLP of 4 E) holds 16 bytes per parameter, with Adam, and 16 `
    + `rows of E elements per token and block. A window sees 1,024 tokens each way, a window of blocks 8 blocks of 128; `
    + `LongNet has the paper's setting, its lengths whole segments of 32,768, others multiples of 128.`;
  const table = el("table", {class: "x-fit"}), head = el("tr"), body = el("tbody"), said = el("p", {class: "x-note", role: "status"});
  table.append(el("caption", {class: "x-unseen"}, "The longest sequence of each way, and what it needs at N"), el("thead", {}, head), body);
  const select = (name, label, options, value) => ({name, label, kind: "select", options, value});
  const whole = (name, label, value, min, max) => ({name, label, kind: "number", value, min, max});
  const shown = el("div"), scroll = el("div", {class: "x-scroll scroll", tabindex: 0, role: "region", "aria-label": "longest sequences"}, table);
  shown.append(scroll, said);
  const key = kit.key(shown);
  shown.append(el("details", {class: "x-note"}, el("summary", {}, "How this is computed, and how exact it is"), NOTE));
  const controls = kit.controls(root, "fit", [
    select("card", "card", data.cards.map(card => [card.key, card.name]), first.card),
    {name: "gib", label: "its memory (GiB)", kind: "number", value: data.cards.find(card => card.key === first.card).gib, min: 1, max: 4096, step: 0.01},
    select("cards", "cards", data.worlds, 1),
    whole("n", "tokens N", first.n, 128, 2 ** 30), whole("batch", "batch", 1, 1, 4096), whole("heads", "heads", first.heads, 1, 1024),
    select("head_dim", "head dim", data.head_dims, first.head_dim), select("dtype", "type", data.dtypes, first.dtype),
    select("mode", "mode", [["fwd", "forward"], ["fwdbwd", "forward + backward"]], first.mode),
    whole("layers", "transformer blocks (0: attention alone)", 0, 0, 1000),
    {name: "seconds", label: "seconds of attention at most", kind: "number", value: first.seconds, min: 0.001, max: 1e9, step: 0.001},
  ], changed);
  root.append(shown);

  function changed(state, name) {
    if (name === "card") { controls.set("gib", model.card(state).gib); return; }
    const rows = data.ways.map(([way, words]) => ({way, words, most: model.longest(state, way)}));
    rows.sort((a, b) => (b.most ? b.most.n : -1) - (a.most ? a.most.n : -1));
    const ends = [1024, Math.max(state.n, ...rows.map(row => row.most?.n || 0), 2048)].map(Math.log2);
    const share = x => `${Math.min(100, Math.max(0, 100 * (Math.log2(Math.max(x, 1)) - ends[0]) / (ends[1] - ends[0])))}%`;
    head.replaceChildren(...["way", "longest N", "log scale; dashed: your N", "limited by", "GiB at N", "time at N", "pairs, of dense"].map(words => el("th", {scope: "col"}, words)));
    body.replaceChildren(...rows.map(({way, words, most}) => row(way, words, most)));
    const run = rows.filter(row => row.most && row.most.n >= state.n), timed = run.map(row => [model.milliseconds(state, row.way, state.n), row.words]).filter(x => x[0] !== null).sort((a, b) => a[0] - b[0]);
    const untimed = run.length - timed.length;
    said.textContent = `${timed.length} of ${rows.length} ways run N = ${kit.number(state.n)} in at most ${seconds(1000 * state.seconds)}` + (timed.length ? `; the fastest is ${timed[0][1]}, ${seconds(timed[0][0])}.` : ".")
      + (untimed ? ` ${untimed}${timed.length ? " more" : ""} would fit in memory, but no time is modelled for ${untimed > 1 ? "them" : "it"}.` : "")
      + (state.layers ? ` Memory is that of ${state.layers} transformer block${state.layers > 1 ? "s" : ""} alone: embeddings, logits and data come on top. Time is that of their attention alone.` : "");
    key([...new Set(rows.filter(row => row.most).map(row => row.most.limiter))].map(limit => [WORDS[limit], COLORS[limit]]));

    function row(way, words, most) {
      if (!most) return el("tr", {}, el("th", {scope: "row"}, words), el("td", {colspan: 6, class: "x-note"}, state.cards > 1 ? "not predicted over several cards" : "not on this card, or not predicted for these inputs"));
      const bar = el("i", {class: "x-bar"}), mark = el("b", {class: "x-at", title: `N = ${kit.number(state.n)}`}), n = model.whole(state, way, state.n), bytes = model.reserved(state, way, n, Infinity);
      bar.style.cssText = `width:${share(most.n)};background:${COLORS[most.limiter]}`;
      mark.style.left = share(state.n);
      const device = bytes + model.card(state).context + (state.cards > 1 ? model.card(state).communicator : 0), time = model.milliseconds(state, way, state.n);
      const fits = most.n >= state.n;
      return el("tr", {class: fits ? "" : "x-short"}, el("th", {scope: "row"}, words), el("td", {}, most.n ? kit.number(most.n) : "none"),
        el("td", {class: "x-wide"}, el("div", {class: "x-bars"}, bar, mark)), el("td", {}, WORDS[most.limiter]), el("td", {}, kit.number(device / 2 ** 30)), el("td", {}, time === null ? "not modelled" : seconds(time)),
        el("td", {}, kit.percent(model.pairs(way, state.n, 1) / (state.n * state.n))));
    }
  }

  function seconds(milliseconds) {
    const s = milliseconds / 1000;
    return s >= 7200 ? `${kit.number(s / 3600)} h` : s >= 0.1 ? `${kit.number(s)} s` : `${kit.number(milliseconds)} ms`;
  }
}
