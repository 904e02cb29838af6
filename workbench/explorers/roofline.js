// The roofline: rate against operations per byte, both logarithmic.
function start(root, data) {
  const MODES = {fwd: "forward", fwdbwd: "forward + backward"};
  const NAMES = {Dense: "dense", Dilated: "LongNet's dilated", BlockSparse: "block-sparse", Neighborhood: "neighborhood or window"};
  const LEFT = 56, RIGHT = 16, TOP = 20, BOTTOM = 44;
  let drawn = [], chosen = null, view = null, canvas = null;
  kit.controls(root, "roofline", [
    {name: "device", label: "device", kind: "select", value: 0, options: data.devices.map((one, k) => [k, one.name]), show: () => data.devices.length > 1},
    {name: "mode", label: "mode", kind: "select", value: "both", options: [["both", "both"], ...Object.entries(MODES)]},
    {name: "family", label: "pattern", kind: "select", value: "all", options: [["all", "all"], ...Object.entries(NAMES)]},
  ], state => { view = state; canvas?.redraw(); });
  canvas = kit.canvas(root, {label: "roofline", height: width => Math.min(460, Math.max(300, 0.55 * width)), draw, keys: true});
  const key = kit.key(root), lines = kit.el("p", {class: "x-note"});
  kit.points(root, canvas.canvas, () => drawn, item => { chosen = item; canvas.redraw(); });
  root.append(lines, kit.el("p", {class: "x-note"}, "Filled: forward; hollow: forward + backward. Point at a mark, or walk with the arrow keys, for its name. Operations are those of attended pairs; bytes are q, k, v and the results, moved once."));

  function color(family) { return kit.color(root, family.toLowerCase()); }

  function draw(ctx, width, height) {
    const device = data.devices[view.device], ink = kit.color(root, "ink"), soft = kit.color(root, "soft"), line = kit.color(root, "line");
    const some = device.points.filter(point => (view.mode === "both" || point.mode === view.mode) && (view.family === "all" || point.family === view.family));
    const top = Math.max(device.tflops, device.peak || 0), ridge = 1000 * device.tflops / device.gbs;
    const xs = [Math.log10(Math.min(ridge / 4, ...device.points.map(p => p.intensity / 2))), Math.log10(2 * Math.max(ridge, ...device.points.map(p => p.intensity)))];
    const ys = [Math.log10(Math.min(...device.points.map(p => p.tflops)) / 2), Math.log10(top * 2)];
    const x = value => LEFT + (Math.log10(value) - xs[0]) / (xs[1] - xs[0]) * (width - LEFT - RIGHT);
    const y = value => height - BOTTOM - (Math.log10(value) - ys[0]) / (ys[1] - ys[0]) * (height - TOP - BOTTOM);
    ctx.clearRect(0, 0, width, height);
    ctx.fillStyle = soft; ctx.strokeStyle = line; ctx.lineWidth = 1;
    for (let k = Math.ceil(xs[0]); k <= xs[1]; k++) { path([[x(10 ** k), TOP], [x(10 ** k), height - BOTTOM]]); text(kit.number(10 ** k), x(10 ** k), height - BOTTOM + 16, "center"); }
    for (let k = Math.ceil(ys[0]); k <= ys[1]; k++) { path([[LEFT, y(10 ** k)], [width - RIGHT, y(10 ** k)]]); text(kit.number(10 ** k), LEFT - 6, y(10 ** k) + 4, "right"); }
    text("operations per byte", (LEFT + width - RIGHT) / 2, height - 8, "center");
    text("TFLOP/s over attended pairs", 4, TOP - 3, "left");
    ctx.strokeStyle = ink; ctx.lineWidth = 1.5;
    ctx.save(); ctx.beginPath(); ctx.rect(LEFT, 0, width - LEFT - RIGHT, height - BOTTOM); ctx.clip();
    path([[x(10 ** xs[0]), y(10 ** xs[0] * device.gbs / 1000)], [x(ridge), y(device.tflops)], [width - RIGHT, y(device.tflops)]]);
    if (device.peak) { ctx.setLineDash([6, 4]); ctx.strokeStyle = soft; ctx.lineWidth = 1; path([[LEFT, y(device.peak)], [width - RIGHT, y(device.peak)]]); ctx.setLineDash([]); }
    ctx.restore();
    lines.textContent = `Lines: what was measured, a copy's ${kit.number(device.gbs)} GB/s up to ${kit.number(device.tflops)} TFLOP/s` + (device.peak ? `; dashed, the vendor's peak, ${kit.number(device.peak)} TFLOP/s.` : ".");
    drawn = some.map(point => ({x: x(point.intensity), y: y(point.tflops), text: `${point.text}\n${kit.percent(point.tflops / device.tflops)} of the ceiling`, point}));
    for (const item of drawn) {
      const its = color(item.point.family), near = chosen && chosen.point === item.point;
      ctx.beginPath(); ctx.arc(item.x, item.y, near ? 7 : 4.5, 0, 2 * Math.PI);
      ctx.fillStyle = item.point.mode === "fwd" ? its : kit.color(root, "paper"); ctx.fill();
      ctx.strokeStyle = near ? ink : its; ctx.lineWidth = near ? 2.5 : 1.5; ctx.stroke();
    }
    key([...new Set(some.map(point => point.family))].map(family => [NAMES[family] || family, color(family)]));
    const best = some.reduce((a, b) => b.tflops > (a?.tflops ?? 0) ? b : a, null);
    canvas.describe(`Roofline of ${device.name}: ${some.length} points; the ceiling is ${kit.number(device.tflops)} TFLOP/s` + (best ? `, the fastest reaches ${kit.percent(best.tflops / device.tflops)} of it: ${best.text.replaceAll("\n", ", ")}.` : "."));

    function path(places) { ctx.beginPath(); places.forEach(([a, b], k) => k ? ctx.lineTo(a, b) : ctx.moveTo(a, b)); ctx.stroke(); }
    function text(words, a, b, align) { ctx.textAlign = align; ctx.fillText(words, a, b); }
  }
}
