"use strict";
// Everything that a model or a document wrote is set as text, never as markup.
const PAGE = 20;
const episodes = JSON.parse(document.getElementById("data").textContent);
const state = { filter: "", benchmark: "", search: "", page: 0 };

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function labelled(label, text, className) {
  const node = element("div", "text " + (className || ""));
  node.append(element("b", "", label), document.createTextNode(text));
  return node;
}

function turnNode(turn, number) {
  const node = element("div", "turn");
  const score = turn.p ? `, P_mem ${turn.p[0].toFixed(3)}, P_full ${turn.p[1].toFixed(3)}` : "";
  node.append(element("h4", "", `Turn ${number}: ${turn.n[0]} + ${turn.n[1]} tokens${score}`));
  if (turn.m !== null) node.append(labelled("memory", turn.m, "memory"));
  if (turn.k !== null) node.append(labelled("think", turn.k));
  if (turn.a !== null) node.append(labelled(turn.a[0], turn.a[1], "action"));
  if (turn.x !== null) node.append(labelled("invalid", turn.x, "wrong"));
  if (turn.raw !== null) node.append(labelled("as written", turn.raw));
  if (turn.i) node.append(labelled("information", turn.i, "information"));
  return node;
}

function episodeNode(episode) {
  const node = element("details", "episode");
  const summary = element("summary");
  summary.append(element("span", "badge " + episode.s, episode.s));
  summary.append(document.createTextNode(episode.q.join("; ")));
  node.append(summary);
  // The body is built when it is opened: a thousand episodes open at once.
  node.addEventListener("toggle", () => {
    if (!node.open || node.children.length > 1) return;
    const body = element("div");
    body.append(labelled("answer", episode.a === null ? "none" : episode.a));
    body.append(labelled("accepted", episode.g.map((golds) => golds.join(" | ")).join("; ")));
    body.append(labelled("result", `EM ${episode.em.toFixed(3)}, F1 ${episode.f1.toFixed(3)}, ended by ${episode.r}`));
    body.append(labelled("sample", `${episode.b}, ${episode.id}`));
    if (episode.e !== null) body.append(labelled("error", episode.e, "error"));
    episode.t.forEach((turn, i) => body.append(turnNode(turn, i + 1)));
    node.append(body);
  });
  return node;
}

function matches(episode) {
  if (state.filter && episode.s !== state.filter) return false;
  if (state.benchmark && episode.b !== state.benchmark) return false;
  if (!state.search) return true;
  const texts = [...episode.q, episode.a || "", episode.id, ...episode.t.map((turn) => turn.m || "")];
  return texts.some((text) => text.toLowerCase().includes(state.search));
}

function show() {
  const found = episodes.filter(matches);
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  state.page = Math.min(Math.max(0, state.page), pages - 1);
  const start = state.page * PAGE;
  const visible = found.slice(start, start + PAGE);
  document.getElementById("episodes").replaceChildren(...visible.map(episodeNode));
  document.getElementById("where").textContent = found.length
    ? `${start + 1} to ${start + visible.length} of ${found.length}`
    : "none";
  document.getElementById("previous").disabled = state.page === 0;
  document.getElementById("next").disabled = state.page >= pages - 1;
}

for (const button of document.querySelectorAll("[data-filter]")) {
  button.addEventListener("click", () => {
    state.filter = button.dataset.filter;
    state.page = 0;
    for (const other of document.querySelectorAll("[data-filter]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    show();
  });
}
document.getElementById("benchmark").addEventListener("change", (event) => {
  state.benchmark = event.target.value;
  state.page = 0;
  show();
});
document.getElementById("search").addEventListener("input", (event) => {
  state.search = event.target.value.trim().toLowerCase();
  state.page = 0;
  show();
});
document.getElementById("previous").addEventListener("click", () => { state.page -= 1; show(); });
document.getElementById("next").addEventListener("click", () => { state.page += 1; show(); });
show();
