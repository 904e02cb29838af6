// Orders of a grid's cells in the page, and the blocks that a neighborhood touches under them. The Python twins are
// workbench.patterns.orderings and analysis.locality.touched; a test compares them.
//
// shape is [W], [H, W] or [D, H, W], the last axis the fastest; a curve is an Int32Array: token i is cell curve[i].
const curves = (() => {
  const NAMES = {row_major: "row-major", snake: "snake", tiles: "tiles", morton: "Morton", hilbert: "Hilbert"};
  const size = shape => shape.reduce((a, b) => a * b, 1);
  const strides = shape => shape.map((_, axis) => size(shape.slice(axis + 1)));

  function make(name, shape, tile) {
    if (name === "row_major") return Int32Array.from({length: size(shape)}, (_, i) => i);
    return {snake, tiles, morton, hilbert}[name](shape, tile);
  }

  function snake(shape) {
    let curve = [0];
    for (const side of [...shape].reverse()) {
      const back = [...curve].reverse(), inner = curve;
      curve = [];
      for (let x = 0; x < side; x++) for (const cell of x % 2 ? back : inner) curve.push(x * inner.length + cell);
    }
    return Int32Array.from(curve);
  }

  // Cells in the order of a list of sides of boxes: calls visit(coordinates) with the last axis fastest.
  function walk(sides, visit, at = []) {
    if (at.length === sides.length) { visit(at); return; }
    for (let x = 0; x < sides[at.length]; x++) walk(sides, visit, [...at, x]);
  }

  function tiles(shape, tile) {
    const curve = [], stride = strides(shape), sizes = shape.map((side, axis) => Math.min(side, tile[axis]));
    walk(shape.map((side, axis) => Math.ceil(side / sizes[axis])), corner =>
      walk(sizes, inside => {
        const cell = corner.map((x, axis) => x * sizes[axis] + inside[axis]);
        if (cell.every((x, axis) => x < shape[axis])) curve.push(cell.reduce((sum, x, axis) => sum + x * stride[axis], 0));
      }));
    return Int32Array.from(curve);
  }

  function morton(shape) {
    const bits = shape.map(side => 32 - Math.clz32(side - 1)), stride = strides(shape), curve = [];
    const order = []; // [axis, bit] of each bit of a code, lowest first
    for (let bit = 0; bit < Math.max(...bits); bit++) for (let axis = shape.length - 1; axis >= 0; axis--) if (bit < bits[axis]) order.push([axis, bit]);
    for (let code = 0; code < 2 ** order.length; code++) {
      const cell = shape.map(() => 0);
      order.forEach(([axis, bit], k) => { if (code >> k & 1) cell[axis] |= 1 << bit; });
      if (cell.every((x, axis) => x < shape[axis])) curve.push(cell.reduce((sum, x, axis) => sum + x * stride[axis], 0));
    }
    return Int32Array.from(curve);
  }

  function hilbert(shape) {
    const stride = strides(shape), curve = [];
    const sides = shape.map((side, axis) => [side, stride[axis]]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    while (sides.length < 3) sides.push([1, 0]);
    fill(curve, 0, sides.map(x => x[0]), sides.map(x => x[1]));
    return Int32Array.from(curve);
  }

  // The curve over a box from its first corner, cell `start`, to the far end of its first side; a stride is negative
  // where its side is walked backwards.
  function fill(curve, start, sides, stride) {
    const long = [0, 1, 2].filter(axis => sides[axis] > 1);
    if (long.length <= 1) {
      for (let x = 0; x < Math.max(...sides); x++) curve.push(start + x * (long.length ? stride[long[0]] : 0));
      return;
    }
    for (const [corner, part] of parts(sides, stride.map(x => x < 0))) {
      const first = start + corner.reduce((sum, x, axis) => sum + x * stride[axis], 0);
      fill(curve, first, part.map(x => x[1]), part.map(([axis]) => axis > 0 ? stride[axis - 1] : -stride[-axis - 1]));
    }
  }

  function parts([a, b, c], backwards) {
    const A = 1, B = 2, C = 3, halves = [a, b, c].map((side, axis) => (side + backwards[axis]) >> 1);
    let [p, q, r] = halves.map((half, axis) => half + ([a, b, c][axis] > 2 ? half % 2 : 0));
    if (a === 1) return [[[0, 0, 0], b >= c ? [[B, b], [C, c], [A, a]] : [[C, c], [B, b], [A, a]]]];
    if (2 * a > 3 * b && 2 * a > 3 * c) return [[[0, 0, 0], [[A, p], [B, b], [C, c]]], [[p, 0, 0], [[A, a - p], [B, b], [C, c]]]];
    if (b === 1 || c === 1) p = halves[0];
    if (3 * b > 4 * c) return [
      [[0, 0, 0], [[B, q], [C, c], [A, p]]],
      [[0, q, 0], [[A, a], [B, b - q], [C, c]]],
      [[a - 1, q - 1, 0], [[-B, q], [C, c], [-A, a - p]]],
    ];
    if (3 * c > 4 * b) return [
      [[0, 0, 0], [[C, r], [A, p], [B, b]]],
      [[0, 0, r], [[A, a], [B, b], [C, c - r]]],
      [[a - 1, 0, r - 1], [[-C, r], [-A, a - p], [B, b]]],
    ];
    return [
      [[0, 0, 0], [[B, q], [C, r], [A, p]]],
      [[0, q, 0], [[C, c], [A, p], [B, b - q]]],
      [[0, q - 1, c - 1], [[A, a], [-B, q], [-C, c - r]]],
      [[a - 1, q, c - 1], [[-C, c], [-A, a - p], [B, b - q]]],
      [[a - 1, q - 1, 0], [[-B, q], [C, r], [-A, a - p]]],
    ];
  }

  function rank(curve) {
    const inverse = new Int32Array(curve.length);
    curve.forEach((cell, i) => { inverse[cell] = i; });
    return inverse;
  }

  function place(cell, shape) { return strides(shape).map((stride, axis) => Math.floor(cell / stride) % shape[axis]); }

  // visit(cell) for each cell within the radius, clipped at the border.
  function around(cell, shape, radius, visit) {
    const stride = strides(shape), at = place(cell, shape);
    const go = (axis, base) => {
      if (axis === shape.length) { visit(base); return; }
      for (let x = Math.max(0, at[axis] - radius); x <= Math.min(shape[axis] - 1, at[axis] + radius); x++) go(axis + 1, base + x * stride[axis]);
    };
    go(0, 0);
  }

  // The key blocks that one cell's window lies in, ascending.
  function keyBlocks(ranks, shape, radius, block, cell) {
    const found = new Set();
    around(cell, shape, radius, other => found.add(Math.floor(ranks[other] / block)));
    return [...found].sort((a, b) => a - b);
  }

  // {rows, seen}: Uint8Array (rows * rows), the (query, key) blocks that hold a visible pair.
  function touched(ranks, shape, radius, block) {
    const rows = Math.ceil(ranks.length / block), seen = new Uint8Array(rows * rows), blockOf = ranks.map(i => Math.floor(i / block));
    const [deep, high, wide] = [1, 1, ...shape].slice(-3), next = new Int32Array(ranks.length); // the next cell of another block
    for (let cell = ranks.length - 1; cell >= 0; cell--)
      next[cell] = (cell + 1) % wide && blockOf[cell + 1] === blockOf[cell] ? next[cell + 1] : cell + 1;
    for (let cell = 0; cell < ranks.length; cell++) {
      const row = blockOf[cell] * rows, z = Math.floor(cell / (high * wide)), y = Math.floor(cell / wide) % high, x = cell % wide;
      for (let a = Math.max(0, z - radius); a <= Math.min(deep - 1, z + radius); a++)
        for (let b = Math.max(0, y - radius); b <= Math.min(high - 1, y + radius); b++) {
          const line = (a * high + b) * wide, last = line + Math.min(wide - 1, x + radius);
          for (let other = line + Math.max(0, x - radius); other <= last; other = next[other]) seen[row + blockOf[other]] = 1;
        }
    }
    return {rows, seen};
  }

  return {NAMES, make, rank, place, around, keyBlocks, touched, size};
})();
