// Patterns in the page: who sees whom, how often, and through layers. The Python twins are workbench.patterns and
// analysis.reach; a test compares them.
//
// A spec is {kind, causal, ...}: "dense"; "dilated" {segments, dilations, offsets: "interleaved" or "blocked"};
// "window" {width, dilation, sinks}; "grid" {shape, radius}, both lists; "blocks" {block, local, global, strided}, a union of layouts,
// each a number or null where it is not wanted. n tokens, h a head of `heads`.
const masks = (() => {
  const ceil = (a, b) => Math.floor((a + b - 1) / b);


  // The residue that head h keeps in a branch of rate r.
  function offset(spec, r, h, heads) { return (spec.offsets === "blocked" ? Math.floor(h / ceil(heads, r)) : h) % r; }

  // One head of each kind, [head, how many see what it sees].
  function kinds(spec, heads) {
    const found = new Map();
    for (let h = 0; h < heads; h++) {
      const key = spec.kind === "dilated" ? spec.dilations.map(r => offset(spec, r, h, heads)).join() : "";
      found.set(key, [found.get(key)?.[0] ?? h, (found.get(key)?.[1] ?? 0) + 1]);
    }
    return [...found.values()];
  }

  // row(spec, n, heads, h, i, out): adds to out (n,) how often query i sees each key.
  function row(spec, n, heads, h, i, out) {
    const end = spec.causal ? i + 1 : n;
    if (spec.kind === "dense") { for (let j = 0; j < end; j++) out[j]++; return; }
    if (spec.kind === "dilated") {
      spec.segments.forEach((w, b) => {
        const r = spec.dilations[b], o = offset(spec, r, h, heads), start = i - i % w;
        if (i % w % r === o) for (let j = start + o, last = Math.min(end, start + w); j < last; j += r) out[j]++;
      });
    } else if (spec.kind === "window") {
      const {width, dilation: d, sinks} = spec, low = i - (spec.causal ? width - 1 : Math.floor(width / 2)) * d;
      const first = low < 0 ? i % d : low, last = Math.min(end - 1, i + Math.floor(width / 2) * d);
      for (let j = first; j <= last; j += d) out[j]++;
      for (let j = 0; j < Math.min(sinks, end); j++) if (j < first || j > last || (j - i) % d !== 0) out[j]++;
    } else if (spec.kind === "grid") {
      const [rows, cols] = spec.shape, [down, across] = spec.radius, y = Math.floor(i / cols), x = i % cols;
      for (let a = Math.max(0, y - down); a <= Math.min(rows - 1, y + down); a++)
        for (let b = Math.max(0, x - across); b <= Math.min(cols - 1, x + across); b++) out[a * cols + b]++;
    } else {
      const a = Math.floor(i / spec.block);
      for (let b = 0; b * spec.block < end; b++)
        if (seesBlock(spec, a, b)) for (let j = b * spec.block; j < Math.min(end, (b + 1) * spec.block); j++) out[j]++;
    }
  }

  function seesBlock({local, global, strided}, a, b) {
    return (local !== null && Math.abs(a - b) <= local) || (global !== null && (a < global || b < global)) || (strided !== null && a % strided === b % strided);
  }

  // --- counting by formula: BigInt, any n ----------------------------------------------------------------------------

  // Attended (head, query, key) pairs, with multiplicity, of all heads.
  function pairs(spec, n, heads) {
    const N = BigInt(n), H = BigInt(heads);
    if (spec.kind === "dense") return H * (spec.causal ? N * (N + 1n) / 2n : N * N);
    if (spec.kind === "window") return H * windowPairs(spec, N);
    if (spec.kind === "grid") return spec.shape.reduce((product, side, axis) => product * pairs({kind: "window", width: 2 * spec.radius[axis], dilation: 1, sinks: 0}, side, 1), H);
    if (spec.kind === "dilated") return dilatedPairs(spec, n, heads);
    return H * blockPairs(spec, n);
  }

  function windowPairs({width, causal, dilation, sinks}, N) {
    const min = (a, b) => a < b ? a : b, d = BigInt(dilation), s = min(BigInt(sinks), N), half = BigInt(Math.floor(width / 2));
    // how many (i, j, m) have i = j + m d, i < x, j < y, m < many
    const steps = (x, y, many) => {
      const whole = min(many, x > y ? (x - y) / d + 1n : 0n), some = min(many, (x + d - 1n) / d) - whole;
      return whole * y + (some > 0n ? some * (x - whole * d) - d * some * (some - 1n) / 2n : 0n);
    };
    const inside = y => steps(N, y, causal ? BigInt(width) : half + 1n) + steps(y, N, causal ? 1n : half + 1n) - min(N, y);
    return inside(N) - inside(s) + (causal ? s * (s + 1n) / 2n + (N - s) * s : N * s);
  }

  function dilatedPairs(spec, n, heads) {
    const square = (kept, causal) => causal ? kept * (kept + 1n) / 2n : kept * kept;
    let total = 0n;
    spec.segments.forEach((w, b) => {
      const r = spec.dilations[b], size = Math.min(w, n), whole = Math.floor(n / size), rest = n - whole * size, many = new Map();
      for (let h = 0; h < heads; h++) { const o = offset(spec, r, h, heads); many.set(o, (many.get(o) ?? 0) + 1); }
      const kept = (o, length) => BigInt(Math.max(0, ceil(length - o, r)));
      for (const [o, times] of many) total += BigInt(times) * (BigInt(whole) * square(kept(o, size), spec.causal) + square(kept(o, rest), spec.causal));
    });
    return total;
  }

  // Quadratic in the number of periods of a strided layout, so that three short lengths determine any long one.
  function blockPairs(spec, n) {
    const period = spec.strided ?? 1, step = period * spec.block, reach = Math.max(spec.local ?? 0, spec.global ?? 0) + 1;
    const turns = Math.floor((n - 2 * reach * spec.block) / step) - 1;
    if (turns < 2) return blockPairsOf(spec, n);
    const [a, b, c] = [0, 1, 2].map(more => blockPairsOf(spec, n - (turns - more) * step)), t = BigInt(turns);
    return a + t * (b - a) + t * (t - 1n) / 2n * (c - 2n * b + a);
  }

  function blockPairsOf(spec, n) {
    const {block} = spec, rows = ceil(n, block);
    let total = 0n;
    for (let a = 0; a < rows; a++) {
      const high = Math.min(n, (a + 1) * block) - a * block;
      let seen = 0;
      for (let b = 0; b < (spec.causal ? a : rows); b++) if (seesBlock(spec, a, b)) seen += Math.min(n, (b + 1) * block) - b * block;
      total += BigInt(high) * BigInt(seen);
      if (spec.causal && seesBlock(spec, a, a)) total += BigInt(high) * BigInt(high + 1) / 2n;
    }
    return total;
  }

  // --- counting by looking: small n ----------------------------------------------------------------------------------

  // {pairs, distinct, uncovered, repeated, most} over all heads: with multiplicity, each once, rows without a key,
  // distinct ones seen more than once, and the highest multiplicity.
  function summary(spec, n, heads) {
    const said = {pairs: 0, distinct: 0, uncovered: 0, repeated: 0, most: 0}, line = new Uint16Array(n);
    for (const [h, times] of kinds(spec, heads))
      for (let i = 0; i < n; i++) {
        line.fill(0);
        row(spec, n, heads, h, i, line);
        let distinct = 0;
        for (let j = 0; j < n; j++) {
          const c = line[j];
          if (c) { distinct++; said.pairs += times * c; if (c > 1) said.repeated += times; if (c > said.most) said.most = c; }
        }
        said.distinct += times * distinct;
        if (!distinct) said.uncovered += times;
      }
    return said;
  }

  // What a query sees in any head, and itself: a layer mixes its heads and keeps its input.
  function step(spec, n, heads, i, out) {
    out.fill(0);
    for (const [h] of kinds(spec, heads)) row(spec, n, heads, h, i, out);
    out[i] = 1;
  }

  // Int16Array (n,): after how many layers a token depends on each other one; 0 itself, -1 not within `layers`.
  function known(spec, n, heads, token, layers) {
    const first = new Int16Array(n).fill(-1), line = new Uint16Array(n);
    let edge = [token], left = n - 1;
    first[token] = 0;
    for (let layer = 1; layer <= layers && edge.length && left; layer++) {
      const next = [];
      for (const i of edge) {
        step(spec, n, heads, i, line);
        for (let j = 0; j < n && left; j++) if (line[j] && first[j] < 0) { first[j] = layer; next.push(j); left--; }
      }
      edge = next;
    }
    return first;
  }

  // The mean share of tokens that a token depends on after 0 to `layers` layers. Time n^3 / 32 a layer: small n.
  function reach(spec, n, heads, layers) {
    const words = ceil(n, 32), line = new Uint16Array(n), steps = [];
    let seen = new Uint32Array(n * words);
    for (let i = 0; i < n; i++) {
      step(spec, n, heads, i, line);
      steps.push([...line.keys()].filter(j => line[j]));
      seen[i * words + (i >> 5)] |= 1 << (i & 31);
    }
    const shares = [1 / n];
    for (let layer = 1; layer <= layers; layer++) {
      if (shares.at(-1) === 1 || (layer > 2 && shares.at(-1) === shares.at(-2))) { shares.push(shares.at(-1)); continue; }
      const next = new Uint32Array(n * words);
      let total = 0;
      for (let i = 0; i < n; i++) {
        const at = i * words;
        for (const j of steps[i]) for (let w = 0, from = j * words; w < words; w++) next[at + w] |= seen[from + w];
        for (let w = at; w < at + words; w++) total += ones(next[w]);
      }
      seen = next;
      shares.push(total / (n * n));
    }
    return shares;
  }

  function ones(x) {
    x -= (x >>> 1) & 0x55555555;
    x = (x & 0x33333333) + ((x >>> 2) & 0x33333333);
    return (((x + (x >>> 4)) & 0x0f0f0f0f) * 0x01010101) >>> 24;
  }

  return {row, pairs, summary, known, reach, kinds};
})();
