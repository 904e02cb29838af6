// The Hilbert explorer: a cell's window on the grid, and the key blocks it falls into, under two orders side by side.
const MOST = 2 ** 14; // cells

function start(root, data) {
  const options = Object.entries(curves.NAMES), solid = state => state.shape.length === 3;
  const specs = [
    {name: "shape", label: "rows, columns (or depth, rows, columns)", kind: "text", size: 12, parse: sides},
    {name: "radius", label: "radius of the window", kind: "number", min: 0, max: 64},
    {name: "block", label: "tokens per block", kind: "number", min: 1, max: 1024},
    {name: "left", label: "left", kind: "select", options},
    {name: "right", label: "right", kind: "select", options},
    {name: "tile", label: "tiles", kind: "text", size: 7, parse: text => kit.list(text, 1, MOST), show: state => state.left === "tiles" || state.right === "tiles"},
    {name: "slice", label: "slice", kind: "number", min: 0, max: MOST, show: solid},
    {name: "path", label: "draw the path", kind: "check"},
  ].map(spec => ({...spec, value: data[spec.name]}));

  const top = kit.el("div"), row = kit.el("div", {class: "x-row"}), below = kit.el("p", {class: "x-note", role: "status"});
  root.append(top, row, below);
  let state, cell = null, kept = new Map();
  const panels = ["left", "right"].map(panel);
  kit.key(root)([["the cell", data.colors.cell], ["its window", data.colors.window], ["the key blocks it touches", data.colors.keys], ["its query block; in the matrix, what the rest of that block touches", data.colors.query]]);
  kit.controls(top, "hilbert", specs, changed);

  function sides(text) {
    const shape = kit.list(text, 1, MOST);
    if (shape.length < 2 || shape.length > 3 || curves.size(shape) > MOST) throw new Error(`two or three sides, and at most ${kit.number(MOST)} cells, please`);
    return shape;
  }

  function changed(now) {
    const {shape} = now, tile = now.tile.length === 1 ? shape.map(() => now.tile[0]) : now.tile;
    if (tile.length !== shape.length && (now.left === "tiles" || now.right === "tiles")) throw new Error(`tiles: one side, or one for each of the ${shape.length} axes, please`);
    if (shape.length === 3 && now.slice >= shape[0]) throw new Error(`slice: 0 to ${shape[0] - 1}, please`);
    const sizes = JSON.stringify([shape, now.radius, now.block, tile]);
    if (state && state.sizes !== sizes) kept = new Map();
    state = {...now, tile, sizes};
    // the centre; in a box the centre of the slice, so that the window meets it
    if (cell === null || cell >= curves.size(shape) || (shape.length === 3 && curves.place(cell, shape)[0] !== now.slice)) cell = middle();
    looked();
  }

  function middle() {
    const [rows, cols] = state.shape.slice(-2);
    return (state.shape.length === 3 ? state.slice * rows * cols : 0) + Math.floor(rows / 2) * cols + Math.floor(cols / 2);
  }

  function order(name) {
    if (!kept.has(name)) {
      const {shape, radius, block, tile} = state, curve = curves.make(name, shape, tile), rank = curves.rank(curve);
      kept.set(name, {curve, rank, ...curves.touched(rank, shape, radius, block)});
    }
    return kept.get(name);
  }

  function looked() { // another cell is looked at
    panels.forEach(each => each.update());
    const names = Object.keys(curves.NAMES).filter(name => name !== "tiles" || state.tile.length === state.shape.length);
    const shares = names.map(name => [name, order(name).seen.reduce((a, b) => a + b, 0) / order(name).seen.length]).sort((a, b) => a[1] - b[1]);
    below.textContent = `Blocks touched over all cells, fewest first: ${shares.map(([name, share]) => `${curves.NAMES[name]} ${kit.percent(share)}`).join(", ")}.`;
  }

  function panel(side) {
    const box = kit.el("div"), title = kit.el("p", {class: "x-title"}), facts = kit.el("p", {class: "x-note"});
    row.append(box);
    box.append(title);
    const rows = () => state.shape.at(-2), cols = () => state.shape.at(-1);
    const high = width => Math.max(40, Math.min(width * rows() / cols(), 420)), scale = width => high(width) / rows();
    const grid = kit.canvas(box, {label: "grid", keys: true, height: high, draw: drawGrid});
    box.append(facts);
    const matrix = kit.canvas(box, {label: "block matrix", height: width => Math.min(width, 300), draw: drawMatrix});
    const base = () => state.shape.length === 3 ? state.slice * rows() * cols() : 0; // of the shown slice
    point();

    function update() {
      const name = state[side], {rank, seen, rows: many} = order(name), query = Math.floor(rank[cell] / state.block);
      const keys = curves.keyBlocks(rank, state.shape, state.radius, state.block, cell), line = seen.subarray(query * many, (query + 1) * many).reduce((a, b) => a + b, 0);
      title.textContent = curves.NAMES[name];
      facts.textContent = `Cell (${curves.place(cell, state.shape).join(", ")}) is token ${kit.number(rank[cell])}, in query block ${kit.number(query)} of ${kit.number(many)}. `
        + `Its window lies in ${kit.number(keys.length)} key block${keys.length > 1 ? "s" : ""}, those of its whole query block in ${kit.number(line)}.`;
      grid.describe(`Grid in ${curves.NAMES[name]} order. ${facts.textContent}`);
      matrix.describe(`Blocks of queries and keys that are touched. ${facts.textContent}`);
      grid.redraw();
      matrix.redraw();
    }

    function drawGrid(ctx, width) {
      const {rank} = order(state[side]), {block} = state, s = scale(width), keys = new Set(curves.keyBlocks(rank, state.shape, state.radius, block, cell));
      const paper = kit.rgb(kit.color(root, "paper")), query = Math.floor(rank[cell] / block), window = new Set();
      curves.around(cell, state.shape, state.radius, other => window.add(other));
      ctx.clearRect(0, 0, width, 500);
      const tints = [0.5, 0.68, 0.82].map(share => kit.mix(kit.rgb(data.colors.keys), paper, share)), ours = kit.mix(kit.rgb(data.colors.query), paper, 0.35);
      const grounds = [paper, ours, ...tints], lit = grounds.map(ground => kit.mix(ground, kit.rgb(data.colors.window), 0.45));
      const [plain, inside] = [grounds, lit].map(colors => colors.map(kit.packed));
      kit.raster(ctx, rows(), cols(), k => {
        const other = base() + k, b = Math.floor(rank[other] / block);
        return (window.has(other) ? inside : plain)[b === query ? 1 : keys.has(b) ? 2 + b % 3 : 0];
      }, 0, 0, cols() * s, rows() * s);
      if (state.path) drawPath(ctx, s);
      const at = curves.place(cell, state.shape).slice(-2), mark = Math.max(s, 5);
      ctx.fillStyle = data.colors.cell;
      ctx.fillRect((at[1] + 0.5) * s - mark / 2, (at[0] + 0.5) * s - mark / 2, mark, mark);
    }

    function drawPath(ctx, s) {
      const {curve} = order(state[side]), last = base() + rows() * cols();
      ctx.strokeStyle = kit.color(root, "soft");
      ctx.lineWidth = Math.max(0.5, Math.min(1.5, s / 8));
      ctx.beginPath();
      let down = false; // the path leaves the slice and comes back
      for (const other of curve) {
        const inside = other >= base() && other < last, at = curves.place(other, state.shape).slice(-2);
        if (inside) ctx[down ? "lineTo" : "moveTo"]((at[1] + 0.5) * s, (at[0] + 0.5) * s);
        down = inside;
      }
      ctx.stroke();
    }

    function drawMatrix(ctx, width) {
      const {rank, seen, rows: many} = order(state[side]), room = Math.min(width, 300), query = Math.floor(rank[cell] / state.block);
      const keys = new Set(curves.keyBlocks(rank, state.shape, state.radius, state.block, cell));
      const [nothing, plain, green, blue] = [kit.color(root, "paper"), kit.color(root, "soft"), data.colors.keys, data.colors.query].map(css => kit.packed(kit.rgb(css))), s = room / many;
      ctx.clearRect(0, 0, width, 300);
      kit.raster(ctx, many, many, k => !seen[k] ? nothing : Math.floor(k / many) !== query ? plain : keys.has(k % many) ? green : blue, 0, 0, room, room, many > 2 * room);
      ctx.strokeStyle = data.colors.window;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(0, query * s - 1, room, Math.max(s, 2) + 2);
    }

    function point() {
      const place = event => { const s = scale(grid.canvas.clientWidth); return [Math.floor(event.offsetY / s), Math.floor(event.offsetX / s)]; };
      const go = ([y, x]) => {
        const other = base() + Math.min(rows() - 1, Math.max(0, y)) * cols() + Math.min(cols() - 1, Math.max(0, x));
        if (other !== cell) { cell = other; panels.forEach(each => each.update()); }
      };
      for (const kind of ["pointermove", "click"]) grid.canvas.addEventListener(kind, event => { const [y, x] = place(event); if (y >= 0 && x >= 0 && y < rows() && x < cols()) go([y, x]); });
      grid.canvas.addEventListener("keydown", event => {
        const [down, across] = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}[event.key] ?? [];
        if (down === undefined) return;
        event.preventDefault();
        const [y, x] = curves.place(cell, state.shape).slice(-2);
        go([y + down, x + across]);
      });
    }

    return {update};
  }
}
