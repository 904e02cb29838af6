// What a call needs on a card: programs of explorers/fit.json through torch's allocator (fit/allocator.py, in short), and
// the modelled time of fit/estimate.py. A setting: {card, gib, cards, batch, heads, head_dim, dtype, mode, layers, seconds}.
const fitModel = data => {
  const MIB = 2 ** 20, LONGEST = 2 ** 30, GRAIN = Object.fromEntries(data.ways.map(([way, , grain]) => [way, grain]));
  const PASSES = {fwd: 2, fwdbwd: 7};

  // The most bytes reserved within the limit, or null where a tensor does not fit. terms: what coefficients multiply.
  function replay(steps, terms, limit) {
    const free = [[], []], born = [];
    let reserved = 0, peak = 0, top = 0;
    const drop = block => free[+block.small].splice(free[+block.small].indexOf(block), 1);
    function taken(small, size) {
      let best = null;
      for (const block of free[+small]) if (block.size >= size && (!best || block.size < best.size || block.size === best.size && block.address < best.address)) best = block;
      if (best) { drop(best); return best; }
      const segment = small ? 2 * MIB : size < 10 * MIB ? 20 * MIB : Math.ceil(size / (2 * MIB)) * 2 * MIB;
      if (reserved + segment > limit) {
        for (const pool of free) for (const block of [...pool]) if (!block.before && !block.after) { drop(block); reserved -= block.size; }
        if (reserved + segment > limit) return null;
      }
      reserved += segment;
      peak = Math.max(peak, reserved);
      top += segment;
      return {address: top - segment, size: segment, small, before: null, after: null};
    }
    function release(block) {
      block.used = false;
      for (const side of ["before", "after"]) {
        const other = block[side];
        if (!other || other.used) continue;
        drop(other);
        block.size += other.size;
        block[side] = other[side];
        if (block[side]) block[side][side === "before" ? "after" : "before"] = block;
        if (side === "before") block.address = other.address;
      }
      free[+block.small].push(block);
    }
    for (const [place, step] of steps.entries()) {
      if (typeof step === "number") { if (born[step]) release(born[step]); continue; }
      let bytes = 0;
      for (let k = 0; k < step.length; k += 2) bytes += step[k + 1] * terms[step[k]];
      const size = Math.ceil(Math.round(bytes) / 512) * 512;
      if (size <= 0) continue;
      let block = taken(size <= MIB, size);
      if (!block) return null;
      const left = block.size - size;
      if (block.small ? left >= 512 : left > MIB) {
        const first = {address: block.address, size, small: block.small, before: block.before, after: block};
        if (block.before) block.before.after = first;
        block.before = first;
        block.address += size;
        block.size = left;
        free[+block.small].push(block);
        block = first;
      }
      block.used = true;
      born[place] = block;
    }
    return peak;
  }

  function card(setting) { return data.cards.find(one => one.key === setting.card); }

  // Bytes for tensors: of the card's memory, less the CUDA context and what a process group takes.
  function budget(setting) {
    const its = card(setting), total = setting.gib === its.gib ? its.total : setting.gib * 2 ** 30;
    return total - its.context - (setting.cards > 1 ? its.communicator : 0);
  }

  function program(setting, way) {
    const words = [way, setting.head_dim, setting.dtype, setting.mode].join(" "), its = data.calls[words][card(setting).kind];
    if (!its) return null;
    if (setting.cards > 1 && GRAIN[way] === 128) return data.programs[data.several[`${words} ${setting.cards}`]] || null;
    const {batch, heads} = setting, at = (batch > 1) + (batch * heads >= 256); // whole segments: a card's share is a call
    return data.programs[its[Math.min(at, its.length - 1)]];
  }

  // What blocks of a transformer add to their attention, on one card: [beside it, at the peak within the MLP, which is
  // without it]. A block: layer norm, four projections, attention, layer norm, an MLP of 4 E; E = heads x head_dim.
  // Training: 16 bytes a parameter (16 bits: weights and gradients of 2, float32 weights and two moments of Adam of 4;
  // float32: four times 4). Kept for the backward, of E elements a token: the two layer norms' inputs and outputs (4),
  // q, k, v and out (4), the MLP's hidden layer before and after GELU (8); and a few float32 a token. The result, its
  // gradient and that of the hidden layer are alive at the peak within the last MLP, and a workspace of cuBLAS on each of
  // two threads.
  function blocks(setting, n) {
    const {layers, heads, head_dim, batch, mode, dtype} = setting, {workspace} = card(setting), width = heads * head_dim, size = dtype === "float32" ? 4 : 2;
    if (!layers) return [0, 0];
    const tokens = batch * n, row = tokens * width * size, parameters = layers * (12 * width ** 2 + 13 * width);
    if (mode === "fwd") return [2 * row, 11 * row].map(bytes => parameters * size + workspace + bytes);
    const states = 16 * parameters + 2 * workspace, small = tokens * (16 * layers + 4 * heads * (layers - 1));
    return [states + (16 * layers - 11) * row + small, states + (16 * layers + 6) * row + small + 4 * heads * tokens];
  }

  // Bytes that the allocator reserves for a call of n tokens over all cards, or null where they do not fit.
  function reserved(setting, way, n, limit = budget(setting)) {
    const steps = program(setting, way), each = n / setting.cards, {batch, heads} = setting, group = batch * heads;
    const [beside, within] = blocks(setting, each);
    if (!steps || beside > limit || within > limit) return null;
    const room = Math.floor(2 ** 26 / (batch * (each + 384) * setting.head_dim)); // as tests/programs.py has it
    const sums = batch * each * Math.min(heads, Math.max(1, room));
    const found = replay(steps, [group * each * each, group * each, group, each, 1, sums], limit - beside);
    return found === null ? null : Math.max(found + beside, within);
  }

  // The pairs that are computed, of a head: between the lengths at which they were counted on straight lines.
  function pairs(way, n, column = 2) {
    const points = data.pairs[way.split(", ")[0]];
    if (!points) return n * n;
    let k = points.findIndex(point => point[0] >= n);
    k = k < 0 ? points.length - 1 : Math.max(1, k);
    const [a, b] = [points[k - 1], points[k]];
    return a[column] + (b[column] - a[column]) * (n - a[0]) / (b[0] - a[0]);
  }

  function between(points, rows) {
    const last = points.at(-1);
    if (rows >= last[0]) return last[1];
    if (rows <= points[0][0]) return points[0][1] * rows / points[0][0];
    const k = points.findIndex(point => point[0] >= rows), [a, low] = points[k - 1], [b, high] = points[k];
    return low + (high - low) * Math.log(rows / a) / Math.log(b / a);
  }

  // The share of the card's peak: see fit.estimate.share, which this is. lines: {head_dim: [[rows, share], ...]}.
  function share(lines, head_dim, rows) {
    const near = Object.keys(lines).map(Number).sort((x, y) => Math.abs(Math.log(x / head_dim)) - Math.abs(Math.log(y / head_dim)) || x - y).slice(0, 2);
    const times = near.map(d => [d, d / between(lines[d], rows)]), [d, time] = times[0], [other, its] = times.at(-1);
    const slope = other !== d ? (its - time) / (other - d) : time / d / (head_dim < d ? 2 : 1);
    return head_dim / Math.max(time + slope * (head_dim - d), time * Math.min(1, head_dim / d));
  }

  // Milliseconds of the attention of a call, of all layers; null where no such time is known.
  function milliseconds(setting, way, n) {
    const {batch, heads, head_dim, mode, dtype, layers} = setting, lines = data.rates[[way, dtype, mode].join(" ")], peak = card(setting).tflops[dtype];
    if (!lines || !peak || setting.cards > 1) return null;
    const operations = 2 * PASSES[mode] * pairs(way, n) * heads * head_dim * batch;
    return (layers || 1) * operations / (share(lines, head_dim, batch * n * heads) * peak * 1e9);
  }

  // What stands in the way of n tokens: "memory", "untimed" (memory, where no time is known and may come first),
  // "validity", "time" or null.
  function limiter(setting, way, n) {
    const time = milliseconds(setting, way, n);
    if (reserved(setting, way, n) === null) return time === null ? "untimed" : "memory";
    if (setting.mode === "fwdbwd" && data.wrong[way] && setting.batch * n * setting.heads * setting.head_dim > 2 ** 31 - 1) return "validity";
    return time > 1000 * setting.seconds ? "time" : null;
  }

  // {n, limiter}: the most tokens that run, a multiple of the way's grain on each card; null where the card does not take
  // the call.
  function longest(setting, way) {
    if (!program(setting, way)) return null;
    const grain = GRAIN[way] * setting.cards;
    let low = 0, high = 1;
    while (high * grain <= LONGEST && !limiter(setting, way, high * grain)) [low, high] = [high, 2 * high];
    if (high * grain > LONGEST) return {n: LONGEST, limiter: "search"};
    while (high - low > 1) { const middle = Math.floor((low + high) / 2); if (limiter(setting, way, middle * grain)) high = middle; else low = middle; }
    return {n: low * grain, limiter: limiter(setting, way, high * grain)};
  }

  function whole(setting, way, n) { const grain = GRAIN[way] * setting.cards; return Math.ceil(n / grain) * grain; }

  return {whole, replay, reserved, blocks, budget, longest, limiter, milliseconds, pairs, program, card};
};
