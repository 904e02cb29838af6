// The calculator: settings, and a bar a way.
function start(root, data) {
  const {el} = kit, model = fitModel(data), first = data.state;
  const COLORS = {memory: "var(--x-memory)", untimed: "var(--x-untimed)", time: "var(--x-time)", validity: "var(--x-wrong)", search: "var(--x-none)"};
  const WORDS = {memory: "memory", untimed: "memory; time not modelled", time: "time", validity: "wrong results beyond", search: "search ends there"};
  const table = el("table", {class: "x-fit"}), head = el("tr"), body = el("tbody"), said = el("p", {class: "x-note", role: "status"});
  table.append(el("caption", {class: "x-unseen"}, "The longest sequence of each way, and what it needs at N"), el("thead", {}, head), body);
  const select = (name, label, options, value) => ({name, label, kind: "select", options, value});
  const whole = (name, label, value, min, max) => ({name, label, kind: "number", value, min, max});
  const shown = el("div"), scroll = el("div", {class: "x-scroll scroll", tabindex: 0, role: "region", "aria-label": "longest sequences"}, table);
  shown.append(scroll, said);
  const key = kit.key(shown);
  shown.append(el("details", {class: "x-note"}, el("summary", {}, "How this is computed, and how exact it is"), data.note));
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
    head.replaceChildren(...["way", "longest N", "", "limited by", "GiB at N", "time at N", "pairs, of dense"].map(words => el("th", {scope: "col"}, words)));
    body.replaceChildren(...rows.map(({way, words, most}) => row(way, words, most)));
    const run = rows.filter(row => row.most && row.most.n >= state.n), timed = run.map(row => [model.milliseconds(state, row.way, state.n), row.words]).filter(x => x[0] !== null).sort((a, b) => a[0] - b[0]);
    const untimed = run.length - timed.length;
    said.textContent = `${timed.length} of ${rows.length} ways run N = ${kit.length(state.n)} in at most ${seconds(1000 * state.seconds)}` + (timed.length ? `; the fastest is ${timed[0][1]}, ${seconds(timed[0][0])}.` : ".")
      + (untimed ? ` ${untimed} more would fit in memory, but the time of ${untimed > 1 ? "these" : "it"} is not modelled.` : "")
      + (state.layers ? ` Memory is that of ${state.layers} transformer block${state.layers > 1 ? "s" : ""} alone: embeddings, logits and data come on top. Time is that of their attention alone.` : "");
    key([...new Set(rows.filter(row => row.most).map(row => row.most.limiter))].map(limit => [WORDS[limit], COLORS[limit]]));

    function row(way, words, most) {
      if (!most) return el("tr", {}, el("th", {scope: "row"}, words), el("td", {colspan: 6, class: "x-note"}, state.cards > 1 ? "not predicted over several cards" : "not on this card, or not predicted for these inputs"));
      const bar = el("i", {class: "x-bar"}), mark = el("b", {class: "x-at", title: `N = ${kit.length(state.n)}`}), n = model.whole(state, way, state.n), bytes = model.reserved(state, way, n, Infinity);
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
