// What a page does by itself: one switch for the code, copy and save buttons, sorted tables, the place in the contents,
// and boxes that say that they scroll. All data are in the page; nothing is fetched.
(function () {
  "use strict";
  const all = (query, at) => Array.from((at || document).querySelectorAll(query));
  const make = (tag, look, text) => Object.assign(document.createElement(tag), { className: look, textContent: text || "" });

  function button(text, label, act) {
    const made = make("button", "tool", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.addEventListener("click", () => act(made));
    return made;
  }

  function save(name, type, text) {
    const link = make("a", "");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // code: hidden by the style unless the box is checked
  const box = document.getElementById("show-code");
  if (/[?&#]code\b/.test(location.search + location.hash)) box.checked = true;
  all(".code").forEach((code) => {
    const copy = button("Copy", "Copy this code", (it) => {
      const done = () => { it.textContent = "Copied"; setTimeout(() => { it.textContent = "Copy"; }, 1500); };
      const pre = code.querySelector("pre"), copied = navigator.clipboard?.writeText(pre.textContent.trim());
      (copied ?? Promise.reject()).then(done, () => {  // no clipboard, or refused: selected, to be copied by hand
        getSelection().selectAllChildren(pre);
      });
    });
    code.append(copy);
  });

  // data: a string of CSV beside each figure and table
  function parsed(text) {
    const rows = [[""]];
    let quoted = false;
    for (let at = 0; at < text.length; at++) {
      const row = rows[rows.length - 1], sign = text[at];
      if (sign === '"' && quoted && text[at + 1] === '"') row[row.length - 1] += text[++at];
      else if (sign === '"') quoted = !quoted;
      else if (sign === "," && !quoted) row.push("");
      else if (sign === "\n" && !quoted) { if (at + 1 < text.length) rows.push([""]); }
      else row[row.length - 1] += sign;
    }
    return rows;
  }

  function tabled(text) {
    const table = make("table", ""), [head, ...rows] = parsed(text);
    const add = (part, cells, tag) => {
      const row = part.insertRow();
      cells.forEach((cell) => { const made = row.appendChild(make(tag, "", cell)); if (tag === "th") made.scope = "col"; });
    };
    add(table.createTHead(), head, "th");
    rows.forEach((row) => add(table.tBodies[0] || table.createTBody(), row, "td"));
    return table;
  }

  all("figure.shown").forEach((figure) => {
    const csv = figure.querySelector("script.csv"), image = figure.querySelector(".picture img");
    const name = document.body.dataset.name + "-" + figure.id, called = figure.querySelector(".number").textContent;
    const text = csv && JSON.parse(csv.textContent), tools = make("div", "tools");
    if (csv && image) {
      const data = tools.appendChild(button("Data", "Show the data of " + called, () => {
        const open = figure.querySelector(".data");
        if (open) open.remove();
        else {
          const held = make("div", "data scroll");
          held.append(sortable(tabled(text)));
          tools.after(held);
          watch(held, "Data of " + called);
        }
        data.setAttribute("aria-expanded", String(!open));
      }));
      data.setAttribute("aria-expanded", "false");
    }
    if (csv) tools.append(button("CSV", "Save the data of " + called + " as CSV", () => save(name + ".csv", "text/csv", text)));
    if (image) tools.append(button("SVG", "Save " + called + " as SVG", () =>
      save(name + ".svg", "image/svg+xml", decodeURIComponent(image.src.slice(image.src.indexOf(",") + 1)))));
    (figure.querySelector("details") || figure).append(tools);
  });

  // tables: a click on a heading sorts, another one the other way round, a third puts them back
  function worth(text) {
    const found = text.trim().match(/^([-−+]?)([\d,]*\.?\d+(?:e[-+]?\d+)?) ?([KMGT]?)/);
    if (!found) return null;
    return (found[1] === "-" || found[1] === "−" ? -1 : 1) * found[2].replace(/,/g, "") * 1024 ** " KMGT".indexOf(found[3] || " ");
  }

  function compare(one, two) {
    const a = worth(one), b = worth(two);
    if (!one.trim() || !two.trim()) return !one.trim() - !two.trim();
    return a !== null && b !== null ? a - b : one.localeCompare(two, "en", { numeric: true });
  }

  function sortable(table) {
    const head = table.tHead && table.tHead.rows[table.tHead.rows.length - 1], body = table.tBodies[0];
    if (!head || !body || all("[rowspan], tbody [colspan]", table).length) return table;
    const first = Array.from(body.rows), words = (cell) => cell && /^\s*[^\s\d.+−-]/.test(cell.textContent);
    Array.from(head.cells).forEach((cell, at) => {  // words stand left, numbers right; a label that repeats is pale
      if (first.some((row) => words(row.cells[at]))) [head, ...first].forEach((row) => row.cells[at] && row.cells[at].classList.add("words"));
    });
    first.forEach((row, at) => row.cells[0].classList.toggle("again", at > 0 && first[at - 1].cells[0].textContent === row.cells[0].textContent));
    if (first.length < 2) return table;
    Array.from(head.cells).forEach((cell, at) => {
      if (!cell.textContent.trim()) return;
      const sort = make("button", "sort", cell.textContent);
      sort.type = "button";
      sort.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "none" }[cell.getAttribute("aria-sort")] || "ascending";
        Array.from(head.cells).forEach((other) => other.removeAttribute("aria-sort"));
        if (next !== "none") cell.setAttribute("aria-sort", next);
        const way = next === "descending" ? -1 : 1, text = (row) => row.cells[at].textContent;
        const rows = next === "none" ? first : first.slice().sort((a, b) =>
          !text(a).trim() || !text(b).trim() ? compare(text(a), text(b)) : way * compare(text(a), text(b)));
        table.classList.toggle("sorted", next !== "none");
        body.append(...rows);
      });
      cell.replaceChildren(sort);
    });
    return table;
  }
  all("figure.table table").forEach(sortable);

  // boxes that scroll sideways: reached by the keyboard, named, faded where there is more
  function watch(scroll, label) {
    const look = () => {
      const more = scroll.scrollWidth - scroll.clientWidth;
      scroll.classList.toggle("more-right", scroll.scrollLeft < more - 2);
      if (more > 1) Object.entries({ tabindex: 0, role: "region", "aria-label": label + ", scrolls sideways" })
        .forEach(([key, value]) => scroll.setAttribute(key, value));
      else ["tabindex", "role", "aria-label"].forEach((key) => scroll.removeAttribute(key));
    };
    scroll.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(scroll);
    all("img", scroll).forEach((image) => image.addEventListener("load", look));
    look();
  }
  all(".scroll, .jp-RenderedHTML, .outputs pre, .prose table").forEach((scroll) => {
    const figure = scroll.closest("figure.shown");
    watch(scroll, figure ? figure.querySelector(".number").textContent : scroll.ariaLabel || "Output");
  });

  // contents: where one is; a bar that opens where there is no room beside the text
  const contents = document.querySelector(".contents details"), narrow = matchMedia("(max-width: 68.99rem)");
  if (contents) {
    const links = all("a", contents), here = contents.querySelector(".here");
    const heads = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
    const fold = () => { contents.open = !narrow.matches; };
    narrow.addEventListener("change", fold);
    links.forEach((link) => link.addEventListener("click", () => { if (narrow.matches) contents.open = false; }));
    const mark = () => {
      const at = heads.reduce((last, head, index) => (head.getBoundingClientRect().top < 120 ? index : last), -1);
      links.forEach((link, index) => (index === at ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
      here.textContent = at < 0 ? "" : links[at].textContent;
    };
    addEventListener("scroll", () => requestAnimationFrame(mark), { passive: true });
    fold();
    mark();
  }
})();
