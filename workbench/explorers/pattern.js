// The pattern explorer: a mask on a canvas, what it counts, and what one token depends on through layers.
const DRAWN = 4096, REACHED = 512; // the longest sequence that is drawn, and of which every token's reach is computed
const LOOKED = 1e8; // cells that are looked at one by one: more would block the page

function start(root, data) {
  const one = kind => state => state.kind === kind;
  const optional = text => text.trim() === "" ? null : kit.whole(text, 0, 4096);
  const kinds = [["dilated", "LongNet (dilated)"], ["blocks", "blocks"], ["window", "window"], ["grid", "neighborhood on a grid"], ["dense", "dense"]];
  const specs = [
    {name: "kind", label: "pattern", kind: "select", options: kinds},
    {name: "n", label: "tokens", kind: "number", min: 1, max: 2 ** 30, show: state => state.kind !== "grid"},
    {name: "shape", label: "rows, columns", kind: "text", parse: text => kit.list(text, 1, 2 ** 15), size: 8, show: one("grid")},
    {name: "segments", label: "segments", kind: "text", parse: text => kit.list(text), show: one("dilated")},
    {name: "dilations", label: "dilations", kind: "text", parse: text => kit.list(text), show: one("dilated")},
    {name: "offsets", label: "offsets of heads", kind: "select", options: [["interleaved", "as in the paper"], ["blocked", "as in its code"]], show: one("dilated")},
    {name: "radius", label: "radius", kind: "number", min: 0, max: 2 ** 30, show: one("grid")},
    {name: "width", label: "window", kind: "number", min: 1, max: 2 ** 30, show: one("window")},
    {name: "dilation", label: "dilation", kind: "number", min: 1, max: 2 ** 20, show: one("window")},
    {name: "sinks", label: "first tokens, seen by all", kind: "number", min: 0, max: 2 ** 20, show: one("window")},
    {name: "block", label: "tokens per block", kind: "number", min: 1, max: 4096, show: one("blocks")},
    {name: "local", label: "neighbours each side", kind: "text", parse: optional, size: 3, show: one("blocks")},
    {name: "global", label: "global blocks", kind: "text", parse: optional, size: 3, show: one("blocks")},
    {name: "strided", label: "every ... block", kind: "text", parse: text => optional(text) || null, size: 3, show: one("blocks")},
    {name: "causal", label: "causal", kind: "check", show: state => state.kind !== "grid"},
    {name: "heads", label: "heads", kind: "number", min: 1, max: 64},
    {name: "head", label: "shown head", kind: "number", min: 0, max: 63, show: state => !state.all},
    {name: "all", label: "all heads together", kind: "check"},
    {name: "layers", label: "layers", kind: "range", min: 1, max: 12},
  ].map(spec => ({...spec, value: data[spec.name]}));

  let state, spec, n, mask, at = null; // at: the query and key that are looked at
  const top = kit.el("div"), left = kit.el("div"), right = kit.el("div");
  root.append(top, kit.el("div", {class: "x-row"}, left, right));
  const picture = kit.canvas(left, {label: "mask", height: width => n <= DRAWN ? Math.min(width, 560) : 60, draw: drawMask, keys: true});
  const maskKey = kit.key(left), facts = kit.facts(right);
  right.append(kit.el("p", {class: "x-title", style: "margin-top: 1rem"}, "Through layers"));
  const strip = kit.canvas(right, {label: "reach", height: width => spec.kind === "grid" ? Math.min(220, Math.max(24, width * spec.shape[0] / spec.shape[1])) : 34, draw: drawStrip});
  const stripKey = kit.key(right), note = kit.el("p", {class: "x-note", role: "status"}), tip = kit.tip(root);
  right.append(note);
  point();
  kit.controls(top, "pattern", specs, changed);

  function read(state) {
    const {kind, causal} = state;
    if (kind === "dilated") {
      if (state.segments.length !== state.dilations.length || !state.segments.length) throw new Error(`${kit.number(state.segments.length)} segments and ${kit.number(state.dilations.length)} dilations: one of each per branch, please`);
      return {kind, causal, segments: state.segments, dilations: state.dilations, offsets: state.offsets};
    }
    if (kind === "blocks") return {kind, causal, block: state.block, local: state.local, global: state.global, strided: state.strided};
    if (kind === "window") return {kind, causal, width: state.width, dilation: state.dilation, sinks: state.sinks};
    if (kind === "dense") return {kind, causal};
    if (state.shape.length !== 2) throw new Error("rows, columns: two numbers, please");
    return {kind, causal: false, shape: state.shape, radius: state.shape.map(() => state.radius)};
  }

  function changed(now) {
    if (now.head >= now.heads && !now.all) throw new Error(`shown head: 0 to ${now.heads - 1}, please`);
    [spec, state] = [read(now), now];
    n = spec.kind === "grid" ? spec.shape[0] * spec.shape[1] : state.n;
    const kinds = masks.kinds(spec, state.heads).length, many = kinds * n * n > LOOKED;
    if (many && state.all && n <= DRAWN) throw new Error(`all heads together: ${kinds} different heads on ${kit.number(n)} tokens are too many to look at; fewer of either, please`);
    const middle = spec.kind === "grid" ? Math.floor(spec.shape[0] / 2) * spec.shape[1] + Math.floor(spec.shape[1] / 2) : Math.floor(n / 2);
    at = at && at.i < n && at.j < n ? at : {i: middle, j: middle};
    mask = null;
    const pairs = masks.pairs(spec, n, state.heads), every = state.heads * n * n, said = n <= DRAWN && !many ? masks.summary(spec, n, state.heads) : null;
    facts([
      ["pairs computed, all heads", `${kit.number(pairs)}, ${kit.percent(Number(pairs) / every)} of dense attention's`],
      ...(said ? [
        ["share of pairs seen", kit.percent(said.distinct / every)],
        ["seen more than once, of these", kit.percent(said.distinct ? said.repeated / said.distinct : 0)],
        ["rows without a key", said.uncovered ? `${kit.number(said.uncovered)} (${kit.percent(said.uncovered / (n * state.heads))})` : "none"],
      ] : n <= DRAWN ? [["share of pairs seen", `not counted: ${kinds} different heads on ${kit.number(n)} tokens`]] : []),
    ]);
    picture.redraw();
    looked();
  }

  function looked() { // another token is looked at
    for (const part of [strip.canvas, stripKey.box, strip.canvas.previousElementSibling]) part.style.display = n <= DRAWN ? "" : "none";
    if (n > DRAWN) { note.textContent = `Masks and reach are drawn up to ${kit.number(DRAWN)} tokens; pairs are counted by formula.`; return; }
    const first = masks.known(spec, n, state.heads, at.i, state.layers), depends = first.filter(layer => layer >= 0).length / n;
    let words = `After ${state.layers} layer${state.layers > 1 ? "s" : ""} token ${kit.number(at.i)} depends on ${kit.percent(depends)} of the tokens`;
    if (n <= REACHED) words += `; the mean over all tokens is ${kit.percent(masks.reach(spec, n, state.heads, state.layers).at(-1))}`;
    note.textContent = `${words}. Click on a row, or move with the arrow keys, to look at another token.`;
    strip.first = first;
    strip.redraw();
  }

  // --- drawing -----------------------------------------------------------------------------------------------------

  // How often the shown head sees each key; with all heads together, how many heads see it.
  function line(i, out) {
    out.fill(0);
    if (!state.all) { masks.row(spec, n, state.heads, state.head, i, out); return; }
    const of = new Uint16Array(n);
    for (const [h, times] of masks.kinds(spec, state.heads)) {
      of.fill(0);
      masks.row(spec, n, state.heads, h, i, of);
      for (let j = 0; j < n; j++) if (of[j]) out[j] += times;
    }
  }

  // The mask in at most `room` bins a side: {bins, most, seen (the share of a bin's pairs), count (the highest), empty}.
  function compute(room) {
    const bins = Math.min(n, room), seen = new Float32Array(bins * bins), count = new Uint16Array(bins * bins), empty = new Uint8Array(bins).fill(1), out = new Uint16Array(n);
    const bin = Array.from({length: n}, (_, i) => Math.floor(i * bins / n)), size = new Float32Array(bins);
    for (let i = 0; i < n; i++) size[bin[i]]++;
    let most = 0;
    for (let i = 0; i < n; i++) {
      line(i, out);
      const start = bin[i] * bins;
      for (let j = 0; j < n; j++) if (out[j]) {
        const k = start + bin[j];
        seen[k]++;
        empty[bin[i]] = 0;
        if (out[j] > count[k]) count[k] = out[j];
        if (out[j] > most) most = out[j];
      }
    }
    for (let a = 0; a < bins; a++) for (let b = 0; b < bins; b++) seen[a * bins + b] /= size[a] * size[b];
    return {bins, most, seen, count, empty, room};
  }

  function shades() {
    const paper = kit.rgb(kit.color(root, "paper")), ink = kit.rgb(kit.color(root, "ink")), dark = paper[0] + paper[1] + paper[2] < 384;
    const color = spec.kind === "dense" ? ink : kit.rgb(data.colors[spec.kind]);
    return {paper, ink, color, deep: kit.mix(color, dark ? [255, 255, 255] : [0, 0, 0], 0.7), empty: kit.mix(paper, kit.rgb(data.colors.empty), dark ? 0.45 : 0.35)};
  }
  function level(shade, count, most) { return most > 1 ? kit.mix(shade.color, shade.deep, (count - 1) / (most - 1)) : shade.color; }

  function frame(width) { const x = 44; return {x, y: 4, side: Math.max(10, Math.min(width - x - 2, 560 - 26))}; }

  function drawMask(ctx, width) {
    const shade = shades();
    maskKey([]);
    ctx.clearRect(0, 0, width, 600);
    ctx.fillStyle = kit.css(shade.ink);
    if (n > DRAWN) { ctx.fillText(`${kit.number(n)} tokens: counted, not drawn`, 4, 30); return; }
    const {x, y, side} = frame(width), room = Math.floor(side * (window.devicePixelRatio || 1));
    if (!mask || mask.room !== room) mask = compute(room);
    const {bins, most, seen, count, empty} = mask, levels = Array.from({length: most + 1}, (_, c) => level(shade, c, most));
    const STEPS = 32; // shades between no pair of a bin and all
    const palette = levels.map(color => Array.from({length: STEPS + 1}, (_, s) => kit.packed(kit.mix(shade.paper, color, (s / STEPS) ** 0.5))));
    const grounds = [kit.packed(shade.paper), kit.packed(shade.empty)];
    kit.raster(ctx, bins, bins, k => seen[k] ? palette[count[k]][Math.ceil(seen[k] * STEPS)] : grounds[empty[Math.floor(k / bins)]], x, y, side, side);
    const cell = side / n;
    ctx.strokeStyle = data.colors.empty;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x - 0.5, y + at.i * cell, side + 1, Math.max(cell, 2)); // the query that is looked at
    ctx.fillStyle = kit.color(root, "soft");
    ctx.textAlign = "right";
    ctx.fillText("0", x - 5, y + 11);
    ctx.fillText(kit.number(n - 1), x - 5, y + side);
    ctx.fillText("query", x - 5, y + side / 2);
    ctx.fillText(kit.number(n - 1), x + side, y + side + 15);
    ctx.textAlign = "left";
    ctx.fillText("0", x, y + side + 15);
    ctx.fillText("key", x + side / 2 - 10, y + side + 15);
    const words = c => state.all ? `${c} head${c > 1 ? "s" : ""}` : c === 1 ? "seen once" : `${c} times`;
    const shown = [...new Set([1, 2, 3, 4, 5, most].filter(c => c <= most))];
    maskKey([...shown.map(c => [words(c), kit.css(levels[c])]), ...(bins < n ? [["paler: part of a pixel's pairs", kit.css(kit.mix(shade.color, shade.paper, 0.6))]] : []), ...(empty.includes(1) ? [["row without a key", kit.css(shade.empty)]] : [])]);
    picture.describe(`Mask of ${n} queries (rows) and keys (columns), ${state.all ? "all heads" : `head ${state.head}`}`);
  }

  function drawStrip(ctx, width, height) {
    const {first} = strip, shade = shades(), layers = state.layers, fade = layer => layer < 0 ? shade.paper : kit.mix(level(shade, layer === 0 ? 2 : 1, 2), shade.paper, layer < 2 ? 0 : 0.75 * (layer - 1) / Math.max(1, layers - 1));
    const [rows, cols] = spec.kind === "grid" ? spec.shape : [1, n], wide = rows > 1 ? Math.min(width, height * cols / rows) : width;
    const colors = Array.from({length: layers + 2}, (_, k) => kit.packed(fade(k - 1)));
    ctx.clearRect(0, 0, width, height);
    kit.raster(ctx, rows, cols, j => colors[first[j] + 1], 0, 0, wide, height, cols > 2 * wide);
    const last = Math.max(...first);
    stripKey([["itself", kit.css(fade(0))], ...Array.from({length: last}, (_, k) => [`${k + 1} layer${k ? "s" : ""}`, kit.css(fade(k + 1))]), ["not yet", kit.css(shade.paper)]].slice(0, first.includes(-1) ? undefined : -1));
    strip.describe(`What token ${at.i} depends on, by layer: ${note.textContent}`);
  }

  // --- pointing ----------------------------------------------------------------------------------------------------

  function point() {
    const place = event => { const {x, y, side} = frame(picture.canvas.clientWidth); return {i: Math.floor((event.offsetY - y) / side * n), j: Math.floor((event.offsetX - x) / side * n)}; };
    const inside = ({i, j}) => n <= DRAWN && i >= 0 && j >= 0 && i < n && j < n;
    function show({i, j}) {
      const out = new Uint16Array(n), {x, y, side} = frame(picture.canvas.clientWidth), box = picture.canvas.getBoundingClientRect(), outer = root.getBoundingClientRect();
      line(i, out);
      const seen = !out[j] ? "not seen" : state.all ? `seen by ${out[j]} of ${state.heads} heads` : out[j] === 1 ? "seen once" : `seen ${out[j]} times`;
      tip.show(box.left - outer.left + x + (j + 0.5) * side / n, box.top - outer.top + y + (i + 0.5) * side / n, `query ${kit.number(i)}, key ${kit.number(j)}: ${seen}`);
    }
    const go = place => { at = place; picture.redraw(); looked(); };
    picture.canvas.addEventListener("pointermove", event => { const here = place(event); if (inside(here)) show(here); else tip.hide(); });
    picture.canvas.addEventListener("pointerleave", () => tip.hide());
    picture.canvas.addEventListener("blur", () => tip.hide());
    picture.canvas.addEventListener("click", event => { const here = place(event); if (inside(here)) go(here); });
    picture.canvas.addEventListener("keydown", event => {
      const [down, across] = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}[event.key] ?? [];
      if (down === undefined || n > DRAWN) return;
      event.preventDefault();
      go({i: Math.min(n - 1, Math.max(0, at.i + down)), j: Math.min(n - 1, Math.max(0, at.j + across))});
      show(at);
    });
  }
}
