// What each rank did in one call. `timeline` has the arithmetic; `start` draws.
const timeline = {
  // The length of the union of [start, took] intervals.
  covered(spans) {
    let total = 0, end = -Infinity;
    for (const [start, took] of [...spans].sort((a, b) => a[0] - b[0])) {
      total += Math.max(0, start + took - Math.max(start, end));
      end = Math.max(end, start + took);
    }
    return total;
  },

  // Microseconds of each stage in which any of its events runs, and of the exchange beside computing.
  shares(events) {
    const spans = stage => events.filter(event => event[0] === stage).map(event => event.slice(2));
    const [compute, pack, exchange] = [0, 1, 2].map(stage => timeline.covered(spans(stage)));
    const beside = compute + exchange - timeline.covered([...spans(0), ...spans(2)]);
    return {compute, pack, exchange, beside: Math.max(0, Math.round(1000 * beside) / 1000)};
  },

  // Steps of an axis over `span` microseconds: 1, 2 or 5 times a power of ten, at most `many` of them.
  step(span, many) {
    const least = span / many, power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map(x => x * power).find(x => x >= least);
  },
};

function start(root, data) {
  const LANE = 16, GAP = 12, LEFT = 118, TOP = 8, AXIS = 34;
  const colors = ["#0072B2", "#E69F00", "#CC79A7"]; // the same on light and dark paper
  const ms = us => `${kit.number(us / 1000)} ms`;
  let state = {call: 0, zoom: 1, at: 0}, boxes = [], chosen = -1;
  const call = () => data.calls[state.call];
  const settings = kit.el("div"), note = kit.el("p", {class: "x-note"});
  root.append(settings, note);
  const made = kit.canvas(root, {
    label: "timeline", keys: true, draw,
    height: () => TOP + AXIS + call().ranks.length * (3 * LANE + GAP),
  });
  kit.key(root)(data.stages.map((stage, k) => [{compute: "computing", pack: "packing rows", exchange: "exchanging"}[stage], colors[k]]));
  const facts = kit.facts(root), tip = kit.tip(root), spoken = kit.el("span", {class: "x-unseen", role: "status"});
  root.append(spoken);

  function view() {
    const span = call().total / state.zoom;
    return [state.at / 100 * (call().total - span), span];
  }

  function draw(ctx, width, height) {
    const [from, span] = view(), narrow = width < 480, left = narrow ? 74 : LEFT, x = t => left + (t - from) / span * (width - left - 8);
    ctx.clearRect(0, 0, width, height);
    ctx.textBaseline = "middle";
    const step = timeline.step(span, narrow ? 4 : 8), digits = Math.max(0, -Math.floor(Math.log10(step / 1000)));
    for (let t = Math.ceil(from / step) * step; t <= from + span * 1.0001; t += step) {
      ctx.fillStyle = kit.color(root, "line");
      ctx.fillRect(x(t), TOP, 1, height - TOP - AXIS);
      ctx.fillStyle = kit.color(root, "soft");
      ctx.textAlign = "center";
      ctx.fillText((t / 1000).toFixed(digits), x(t), height - AXIS + 10);
    }
    ctx.textAlign = "right";
    ctx.fillText("ms", width - 8, height - 8);
    boxes = [];
    call().ranks.forEach((events, rank) => data.stages.forEach((stage, k) => {
      const y = TOP + rank * (3 * LANE + GAP) + k * LANE;
      ctx.textAlign = "left";
      ctx.fillStyle = kit.color(root, "ink");
      if (!k) ctx.fillText(`${call().rank} ${rank}`, 0, y + LANE / 2);
      ctx.fillStyle = kit.color(root, "soft");
      if (!narrow) ctx.fillText(stage, 52, y + LANE / 2);
      ctx.fillStyle = kit.color(root, "wash");
      ctx.fillRect(left, y + 1, width - left - 8, LANE - 2);
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, y, width - left - 8, LANE);
      ctx.clip();
      for (const event of events) if (event[0] === k && event[2] + event[3] >= from && event[2] <= from + span) {
        const box = {x: x(event[2]), y: y + 2, w: Math.max(1.5, x(event[2] + event[3]) - x(event[2])), h: LANE - 4, event, rank};
        ctx.fillStyle = colors[k];
        ctx.fillRect(box.x, box.y, box.w, box.h);
        if (box.w > 3) { ctx.fillStyle = kit.color(root, "paper"); ctx.fillRect(box.x + box.w - 0.5, box.y, 0.5, box.h); }
        boxes.push(box);
      }
      ctx.restore();
    }));
    const box = boxes[chosen];
    if (box) { ctx.strokeStyle = kit.color(root, "ink"); ctx.lineWidth = 2; ctx.strokeRect(box.x, box.y, box.w, box.h); }
  }

  function words({event, rank}) {
    return `${call().rank} ${rank}, ${data.stages[event[0]]}: ${call().names[event[1]]}\nfrom ${ms(event[2])}, for ${ms(event[3])}`;
  }

  function show(at) {
    chosen = at;
    const box = boxes[at];
    if (box) {
      const inner = made.canvas.getBoundingClientRect(), outer = root.getBoundingClientRect();
      tip.show(inner.left - outer.left + Math.max(0, box.x) + Math.min(box.w / 2, 60), inner.top - outer.top + box.y, words(box));
    } else tip.hide();
    made.redraw();
  }

  made.canvas.addEventListener("pointermove", event => {
    const inside = box => event.offsetX >= box.x - 2 && event.offsetX <= box.x + box.w + 2 && event.offsetY >= box.y - 2 && event.offsetY <= box.y + box.h + 2;
    const found = boxes.map((box, k) => [box.w, k, box]).filter(([, , box]) => inside(box)).sort((a, b) => a[0] - b[0])[0];
    if ((found ? found[1] : -1) !== chosen) show(found ? found[1] : -1);
  });
  made.canvas.addEventListener("pointerleave", () => show(-1));
  made.canvas.addEventListener("blur", () => show(-1));
  made.canvas.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") show(-1);
    if (!step || !boxes.length) return;
    event.preventDefault();
    show(((chosen < 0 && step < 0 ? 0 : chosen) + step + boxes.length) % boxes.length);
    spoken.textContent = words(boxes[chosen]);
  });

  kit.controls(settings, "timeline", [
    {name: "call", label: "call", kind: "select", value: 0, options: data.calls.map((one, k) => [k, one.label])},
    {name: "zoom", label: "zoom", kind: "range", value: 1, values: [1, 2, 4, 8, 16, 32, 64], words: x => `${x} times`},
    {name: "at", label: "from", kind: "range", value: 0, min: 0, max: 100, step: 1, show: s => s.zoom > 1, words: (x, s) => ms(x / 100 * data.calls[s.call].total * (1 - 1 / s.zoom))},
  ], now => {
    state = now;
    chosen = -1;
    tip.hide();
    const {about, total, ranks} = call();
    note.textContent = `${about}: ${ms(total)} from the first event to the end of the last. Each bar is an event; point at one, or use the arrow keys, for its name.`;
    const told = ranks.map(timeline.shares);
    facts(told.map((x, rank) => [`${call().rank} ${rank}`, `computes ${ms(x.compute)}, packs ${ms(x.pack)}, exchanges ${ms(x.exchange)}, of which ${ms(x.beside)} beside computing`]));
    made.describe(`Timeline of one call, ${call().label}: ${ms(total)} on ${ranks.length} ${call().rank}s`);
    made.redraw();
  });
}
