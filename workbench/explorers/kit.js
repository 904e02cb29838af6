// What every explorer is made of. Each file of this folder defines one constant; `start(root, data)` comes last.
const kit = (() => {
  // --- elements and words ------------------------------------------------------------------------------------------
  // el("p", {class: "x-note"}, "text", another): null and false among the children are left out.
  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
    made.append(...children.filter(child => child !== null && child !== false));
    return made;
  }

  // A whole number (also a BigInt) with commas; others with three digits, as harness.narrate.number.
  function number(x) {
    if (typeof x === "bigint") return x.toLocaleString("en-US");
    if (Math.abs(x) >= 100 || Number.isInteger(x)) return Math.round(x).toLocaleString("en-US");
    return String(Number(x.toPrecision(3)));
  }

  // Tokens, as plots.style.length: 131072 is 128K; what is no exact multiple of 1,024 stays in full.
  function length(n) {
    for (const [size, unit] of [[2 ** 20, "M"], [2 ** 10, "K"]]) if (n >= size && n % size === 0) return number(n / size) + unit;
    return number(n);
  }

  function bytes(n) {
    for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (n >= size) return `${number(n / size)} ${unit}`;
    return `${number(n)} bytes`;
  }

  // A share in percent, three digits, and never 0 or 100 where it is less but not exactly that.
  function percent(x) {
    if (x === 0 || x === 1) return `${100 * x}%`;
    const shown = Number((100 * x).toPrecision(3));
    return shown >= 100 && x < 1 ? ">99.9%" : `${shown < 1e-4 ? shown.toExponential(1) : shown}%`;
  }

  // "64, 128" as [64, 128]; throws in words where an entry is no whole number of at least `least`.
  function list(text, least = 1, most = 2 ** 30) {
    return String(text).split(/[\s,]+/).filter(Boolean).map(word => whole(word, least, most));
  }

  function whole(word, least, most) {
    const value = Number(word);
    if (String(word).trim() === "" || !Number.isInteger(value) || value < least || value > most)
      throw new Error(`“${word}”: a whole number from ${number(least)} to ${number(most)}, please`);
    return value;
  }

  // --- state in the address ----------------------------------------------------------------------------------------
  // "#~pattern?n=64&causal=true~hilbert?height=16": each explorer has its own part. Other hashes are anchors: left alone.
  function readHash(name) {
    for (const part of location.hash.startsWith("#~") ? location.hash.slice(2).split("~") : []) {
      const [owner, query] = part.split("?");
      if (owner === name) return Object.fromEntries(new URLSearchParams(query));
    }
    return {};
  }

  function writeHash(name, entries) {
    if (document.body.dataset.jpThemeName !== undefined) return; // JupyterLab's address is its own
    const others = (location.hash.startsWith("#~") ? location.hash.slice(2).split("~") : []).filter(part => part.split("?")[0] !== name);
    const query = new URLSearchParams(entries).toString().replaceAll("~", "%7E");
    try { history.replaceState(null, "", `#~${[...others, `${name}?${query}`].join("~")}`); } catch { /* in a frame without an address */ }
  }

  // --- controls ----------------------------------------------------------------------------------------------------
  // controls(root, "pattern", specs, changed): labelled inputs in a row, and their state, an object by name.
  // A spec: {name, label, kind, value, ...}, kind one of
  //   "range" {min, max, step, values}: values, if given, are what the positions stand for
  //   "number" {min, max}: whole unless step is given; "text" {parse, size}: parse(text) -> value, throws Error in words
  //   "select" {options: [[value, words], ...] or [value, ...]}; "check": a boolean
  // and optionally show(state) -> bool (hidden elsewhere), words(value, state) -> string beside a range.
  // changed(state, name) is called after each change that is valid (with name "" at the end of controls, once); what it
  // throws is shown below the controls. Returns {state, set(name, value)}.
  function controls(root, owner, specs, changed) {
    const state = {}, parts = {}, written = readHash(owner), bad = new Map();
    const error = el("p", {class: "x-error", role: "alert", hidden: true});
    const box = el("div", {class: "x-controls", role: "group", "aria-label": "settings"});
    root.append(box);
    for (const spec of specs) {
      const part = parts[spec.name] = {spec, ...input(spec)};
      box.append(part.label);
      state[spec.name] = spec.value;
      if (spec.name in written) try { state[spec.name] = read(spec, written[spec.name]); } catch { /* an address of another version */ }
      part.input.addEventListener("input", () => take(part));
    }
    box.append(error);

    function take(part) {
      try {
        state[part.spec.name] = read(part.spec, raw(part.input, part.spec));
        bad.delete(part.spec.name);
        part.input.removeAttribute("aria-invalid");
      } catch (why) {
        bad.set(part.spec.name, `${part.spec.label}: ${why.message}`);
        part.input.setAttribute("aria-invalid", "true");
      }
      update(part.spec.name);
    }

    function update(name) {
      for (const part of Object.values(parts)) {
        const {spec} = part;
        part.label.hidden = spec.show ? !spec.show(state) : false;
        part.label.style.display = part.label.hidden ? "none" : "";
        if (part.output) {
          const words = spec.words ? spec.words(state[spec.name], state) : typeof state[spec.name] === "number" ? number(state[spec.name]) : String(state[spec.name]);
          part.output.textContent = words;
          part.input.setAttribute("aria-valuetext", words);
        }
      }
      let said = [...bad].filter(([key]) => !parts[key].label.hidden).map(([, words]) => words).join(" ");
      if (!said) try { changed(state, name); } catch (why) { if (!(why instanceof Error) || why.name !== "Error") throw why; said = why.message; }
      error.textContent = said;
      error.hidden = !said;
      if (name && !said) writeHash(owner, Object.fromEntries(Object.values(parts).filter(part => !part.label.hidden).map(part => [part.spec.name, raw(part.input, part.spec)])));
    }

    function show(part) { put(part.input, part.spec, position(part.spec, state[part.spec.name])); }

    Object.values(parts).forEach(show);
    update("");
    if (!error.hidden && Object.keys(written).length) { // an address whose settings do not go together
      for (const spec of specs) state[spec.name] = spec.value;
      Object.values(parts).forEach(show);
      update("");
    }
    return {
      state,
      set(name, value) { state[name] = value; bad.delete(name); parts[name].input.removeAttribute("aria-invalid"); show(parts[name]); update(name); },
    };
  }

  function input(spec) {
    const attributes = {autocomplete: "off"};
    let made;
    if (spec.kind === "select") {
      made = el("select", attributes, ...spec.options.map(entry => {
        const [value, words] = Array.isArray(entry) ? entry : [entry, entry];
        return el("option", {value}, String(words));
      }));
    } else {
      const type = spec.kind === "check" ? "checkbox" : spec.kind;
      const ends = spec.kind === "text" ? {} : spec.values ? {min: 0, max: spec.values.length - 1, step: 1} : {min: spec.min, max: spec.max, step: spec.step ?? 1};
      made = el("input", {type, ...attributes, ...(spec.kind === "check" ? {} : ends), ...(spec.kind === "text" ? {spellcheck: "false", size: spec.size ?? 20} : {})});
    }
    made.name = spec.name;
    const output = spec.kind === "range" ? el("output") : null;
    return {input: made, output, label: el("label", {}, el("span", {class: "x-name"}, spec.label), made, output)};
  }

  function raw(made, spec) { return spec.kind === "check" ? String(made.checked) : made.value; }
  function put(made, spec, text) { if (spec.kind === "check") made.checked = String(text) === "true"; else made.value = text; }
  function position(spec, value) { return spec.values ? spec.values.indexOf(value) : Array.isArray(value) ? value.join(", ") : value; }

  function read(spec, text) {
    if (spec.kind === "check") return text === "true";
    if (spec.kind === "range") {
      if (!spec.values) return Math.min(spec.max, Math.max(spec.min, Number(text) || 0));
      return spec.values[whole(text, 0, spec.values.length - 1)];
    }
    if (spec.kind === "text") return spec.parse ? spec.parse(text) : text;
    if (spec.kind === "select") { const entry = spec.options.map(x => Array.isArray(x) ? x[0] : x).find(value => String(value) === text); if (entry === undefined) throw new Error("not one of these"); return entry; }
    if (spec.step === undefined) return whole(text, spec.min ?? -(2 ** 53), spec.max ?? 2 ** 53);
    const value = Number(text);
    if (text.trim() === "" || !(value >= (spec.min ?? -Infinity) && value <= (spec.max ?? Infinity))) throw new Error(`a number from ${number(spec.min)} to ${number(spec.max)}, please`);
    return value;
  }

  // --- drawing -----------------------------------------------------------------------------------------------------
  // canvas(parent, {label, height, draw, keys}): as wide as its parent, sharp on any screen.
  // height: CSS pixels, or a function of the width; draw(ctx, width, height) in CSS pixels, called again whenever the
  // size, the colours (dark, print) or `redraw()` ask for it. keys: true makes it reachable by Tab.
  function canvas(parent, {label, height, draw, keys = false}) {
    const made = el("canvas", {role: "img", "aria-label": label, tabindex: keys ? 0 : null});
    const ctx = made.getContext("2d");
    parent.append(made);
    let asked = false, width = 0;
    function paint() {
      asked = false;
      width = made.clientWidth;
      if (!width) return;
      const high = Math.round(typeof height === "function" ? height(width) : height), ratio = window.devicePixelRatio || 1;
      made.style.height = `${high}px`;
      [made.width, made.height] = [Math.round(width * ratio), Math.round(high * ratio)];
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.font = `12px ${getComputedStyle(made).fontFamily}`;
      draw(ctx, width, high);
    }
    function redraw() { if (!asked) { asked = true; requestAnimationFrame(paint); } }
    new ResizeObserver(() => { if (made.clientWidth !== width) redraw(); }).observe(made);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new MutationObserver(redraw).observe(document.documentElement, {attributes: true, attributeFilter: ["class", "style", "data-theme"]});
    matchMedia("print").addEventListener("change", paint); // at once: the page is printed next
    return {canvas: made, redraw, paint, describe: text => made.setAttribute("aria-label", text)};
  }

  // A colour of the page by its name in kit.css: color(root, "ink"). Any CSS colour as [r, g, b] by rgb().
  function color(root, name) { return getComputedStyle(root).getPropertyValue(`--x-${name}`).trim() || "#000"; }
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  function rgb(css) {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = css;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }
  function mix(a, b, share) { return a.map((x, k) => Math.round(x + (b[k] - x) * share)); }
  function css(color) { return `rgb(${color.join(",")})`; }

  // A picture of rows x cols cells at x, y, w wide and h high: color(k) -> packed(a colour) of the k-th cell.
  function raster(ctx, rows, cols, color, x, y, w, h, smooth = false) {
    const image = new ImageData(cols, rows), pixels = new Uint32Array(image.data.buffer), small = new OffscreenCanvas(cols, rows);
    for (let k = 0; k < rows * cols; k++) pixels[k] = color(k);
    small.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = smooth;
    ctx.drawImage(small, x, y, w, h);
    ctx.strokeStyle = getComputedStyle(ctx.canvas).getPropertyValue("--x-line");
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  }
  function packed([r, g, b]) { return (255 << 24 | b << 16 | g << 8 | r) >>> 0; } // as canvases keep it on all machines of today

  // --- pointing ----------------------------------------------------------------------------------------------------
  // A tooltip inside the explorer: tip(root).show(event or {x, y} in pixels of root, text), hide().
  function tip(root) {
    const box = el("div", {class: "x-tip", hidden: true});
    root.append(box);
    return {
      show(x, y, text) {
        box.textContent = text;
        box.hidden = false;
        const left = Math.max(0, Math.min(x + 12, root.clientWidth - box.offsetWidth));
        box.style.left = `${left}px`;
        box.style.top = `${y - box.offsetHeight - 10 < -30 ? y + 14 : y - box.offsetHeight - 10}px`;
      },
      hide() { box.hidden = true; },
    };
  }

  // Things on a canvas that have words: hovering or tapping shows the nearest one's, the arrow keys go from one to the
  // next. items() -> [{x, y, text}] in CSS pixels of the canvas. chosen(item or null), if given, may redraw.
  function points(root, made, items, chosen = () => {}) {
    const words = tip(root), spoken = el("span", {class: "x-unseen", role: "status"});
    let at = -1;
    made.tabIndex = 0;
    root.append(spoken);
    function show(item) {
      if (!item) { words.hide(); chosen(null); return; }
      const inner = made.getBoundingClientRect(), outer = root.getBoundingClientRect();
      words.show(inner.left - outer.left + item.x, inner.top - outer.top + item.y, item.text);
      chosen(item);
    }
    made.addEventListener("pointermove", event => {
      const apart = items().map((item, k) => [Math.hypot(item.x - event.offsetX, item.y - event.offsetY), item, k]).sort((a, b) => a[0] - b[0])[0];
      if (apart && apart[0] < 24) { at = apart[2]; show(apart[1]); } else show(null);
    });
    made.addEventListener("pointerleave", () => show(null));
    made.addEventListener("blur", () => show(null));
    made.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key], all = items();
      if (!step || !all.length) { if (event.key === "Escape") show(null); return; }
      event.preventDefault();
      at = (at + step + all.length) % all.length;
      show(all[at]);
      spoken.textContent = all[at].text;
    });
  }

  // --- start -------------------------------------------------------------------------------------------------------
  // Facts as a list of terms and values: facts(parent)([["pairs", "1,024"], ...]).
  function facts(parent) {
    const box = el("dl", {class: "x-facts"});
    parent.append(box);
    return pairs => box.replaceChildren(...pairs.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
  }

  // A key: [["seen once", css colour], ...].
  function key(parent) {
    const box = el("div", {class: "x-key"});
    parent.append(box);
    const fill = entries => box.replaceChildren(...entries.map(([words, color]) => el("span", {}, el("i", {style: `background: ${color}`}), words)));
    return Object.assign(fill, {box});
  }

  function mount(root, start, data) {
    root.querySelector(".x-off")?.remove();
    try { start(root, data); } catch (why) {
      root.append(el("p", {class: "x-error", role: "alert"}, `This explorer could not start: ${why.message}`));
      throw why;
    }
  }

  return {el, number, length, bytes, percent, list, whole, controls, canvas, color, rgb, mix, css, raster, packed, tip, points, facts, key, mount};
})();
