"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const choosers = {};

function element(tag, parent, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

/* plotly.js is in the page as gzip: unpacked when the first figure comes into view. */
let loading;
function plotly() {
  loading ??= (async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.appendChild(script);
    return window.Plotly;
  })();
  return loading;
}

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const made = { ...layout, font: { ...layout.font, color: colour("--text") } };
  for (const key of Object.keys(made)) {
    if (/^[xy]axis/.test(key)) {
      made[key] = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), ...made[key] };
    }
  }
  if (window.innerWidth < 600) made.margin = { ...made.margin, l: 45, r: 5 };
  return made;
}

async function draw(place, figure) {
  const Plotly = await plotly();
  const options = { responsive: true, displaylogo: false };
  await Plotly.react(place, figure.data, themed(figure.layout), options);
  place.dataset.drawn = "yes";
}

function showFigures(box, figures) {
  const labels = Object.keys(figures);
  let chosen = labels[0];
  const place = document.createElement("div");
  place.className = "plot";
  if (labels.length > 1) {
    const select = element("select", box);
    select.setAttribute("aria-label", "which one");
    for (const label of labels) element("option", select, label).value = label;
    select.onchange = () => { chosen = select.value; draw(place, figures[chosen]); };
    for (const label of labels) {
      choosers[label] = () => {
        select.value = label;
        select.onchange();
        box.scrollIntoView({ behavior: "smooth", block: "nearest" });
      };
    }
  }
  box.appendChild(place);
  const watcher = new IntersectionObserver((seen) => {
    if (!seen.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    draw(place, figures[chosen]);
  }, { rootMargin: "300px" });
  watcher.observe(place);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", () => {
    if (place.dataset.drawn) draw(place, figures[chosen]);
  });
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  const x = Number(a), y = Number(b);
  return Number.isNaN(x) || Number.isNaN(y) ? String(a).localeCompare(String(b)) : x - y;
}

function asText(number) {
  const size = Math.abs(number);
  if (size && (size < 1e-3 || size >= 1e15)) return number.toExponential(3);
  const digits = Number.isInteger(number) ? 15 : 4;
  return number.toLocaleString("en", { maximumSignificantDigits: digits });
}

function showTable(box, table) {
  const FEW = 10;
  let { sort, descending } = table;
  let all = table.rows.length <= FEW + 2;
  const tools = element("div", box);
  tools.className = "tools";
  const filter = element("input", tools);
  filter.type = "search";
  filter.placeholder = "filter rows";
  filter.setAttribute("aria-label", "filter rows");
  filter.hidden = table.rows.length < 6;
  const more = element("button", tools);
  const count = element("span", tools);
  const scroll = element("div", box);
  scroll.className = "scroll";
  const made = element("table", scroll);
  if (table.one_line) made.className = "one-line";
  const heads = element("tr", element("thead", made));
  const body = element("tbody", made);
  const numeric = table.columns.map((_, at) =>
    table.rows.some((row) => typeof row[at] === "number"));
  const buttons = table.columns.map((title, at) => {
    const head = element("th", heads);
    if (numeric[at]) head.className = "number";
    const button = element("button", head, title);
    button.onclick = () => {
      descending = sort === at ? !descending : numeric[at] && at !== table.sort;
      sort = at;
      render();
    };
    return button;
  });
  function render() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = table.rows.filter((row) => {
      const text = row.join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (sort !== null) {
      rows.sort((a, b) => {
        if (a[sort] === null || b[sort] === null) return compare(a[sort], b[sort]);
        return (descending ? -1 : 1) * compare(a[sort], b[sort]);
      });
    }
    buttons.forEach((button, at) => {
      const arrow = at === sort ? (descending ? " ▾" : " ▴") : "";
      button.textContent = table.columns[at] + arrow;
      const order = at !== sort ? "none" : descending ? "descending" : "ascending";
      button.parentElement.setAttribute("aria-sort", order);
    });
    const shown = all ? rows : rows.slice(0, FEW);
    count.textContent = `${shown.length} of ${table.rows.length}`;
    more.hidden = table.rows.length <= FEW + 2;
    more.textContent = all ? `show ${FEW}` : "show all";
    body.replaceChildren();
    for (const row of shown) {
      const line = element("tr", body);
      row.forEach((cell, at) => {
        const place = element("td", line, typeof cell === "number" ? asText(cell) : cell ?? "");
        if (numeric[at]) place.className = "number";
        else if (table.one_line) place.title = cell ?? "";
      });
      const pick = table.picks === null ? undefined : choosers[row[table.picks]];
      if (pick) {
        line.className = "picks";
        line.title = "show its values";
        line.onclick = pick;
      }
    }
  }
  filter.oninput = render;
  more.onclick = () => { all = !all; render(); };
  render();
}

/* Figures first: rows of tables choose among them. */
data.sections.forEach((section, at) => {
  const box = document.querySelector(`#s${at} .figure`);
  if (box) showFigures(box, section.figures);
});
data.sections.forEach((section, at) => {
  const box = document.querySelector(`#s${at} .table`);
  if (box) showTable(box, section.table);
});
document.documentElement.dataset.ready = Math.round(performance.now());
