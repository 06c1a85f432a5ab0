// Frame of the dashboard: navigation, status of the stream, login, and the colour theme.

import { $, h, put, refill } from "./dom.js";
import { clock } from "./format.js";
import { keep } from "./keys.js";
import { Overview } from "./pages/overview.js";
import { severeProblems } from "./problems.js";
import { follow, on, pause, show as showWindow, store } from "./store.js";

const PAGES = {
  overview: async () => Overview,
  learning: async () => (await import("./pages/learning.js")).Learning,
  traffic: async () => (await import("./pages/traffic.js")).Traffic,
  versions: async () => (await import("./pages/versions.js")).Versions,
  playground: async () => (await import("./pages/playground.js")).Playground,
};
const WITHOUT_WINDOW = ["versions", "playground"];

const pages = {};
// Pages are created after the first data, which describes their charts.
let resolveFirstData;
const firstData = new Promise((resolve) => (resolveFirstData = resolve));
let current = null;
let disconnected = false;

const pageInUrl = () => (location.hash.slice(1) in PAGES ? location.hash.slice(1) : "overview");

async function openPage() {
  const name = pageInUrl();
  const title = name[0].toUpperCase() + name.slice(1);
  put($("title"), title);
  document.title = `${title} · osd`;
  $("window").hidden = WITHOUT_WINDOW.includes(name);
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (current) current.element.hidden = true;
  pages[name] ??= Promise.all([PAGES[name](), firstData]).then(([Page]) => {
    const page = new Page(store.state);
    $("pages").append(page.element);
    return page;
  });
  const page = await pages[name];
  page.element.hidden = name !== pageInUrl();
  if (page.element.hidden) return;
  current = page;
  render();
}

function render() {
  showNotices();
  const { state, bins, time, seconds } = store;
  if (!state || !current) return;
  put($("model"), state.model.id);
  // The playground needs the sources of tokens, which only our engine reports.
  const plays = state.answers && state.engine === "osd";
  document.querySelector('#nav a[href="#playground"]').hidden = !plays;
  if (!plays && pageInUrl() === "playground") location.hash = "overview";
  put($("subtitle"), `domain ${state.domain}, ${state.drafter}, ${state.replicas.length} replica${state.replicas.length === 1 ? "" : "s"}`);
  // The charts of a new server start at its first data, and span at least a minute.
  const from = Math.max(time - seconds, Math.min(bins.time[0] ?? time, time - 60));
  current.show({ ...store, span: [from, time] });
}

// Shows problems that concern all figures. The overview shows the problems of the service itself.
function showNotices() {
  const { state } = store;
  const notices = disconnected ? [state ? `The server does not answer. The page shows data of ${clock(store.time)}; trying again.` : "The server does not answer; trying again."] : [];
  if (state && !disconnected && pageInUrl() !== "overview") notices.push(...severeProblems(store).map(([text]) => text));
  refill($("notices"), notices, () => notices.map((text) => h("p", { class: "notice bad" }, text)));
}

function showStatus(text, mood = "") {
  put($("status"), text);
  $("status").className = `pill ${mood}`;
}

on("status", (status) => {
  disconnected = status === "lost";
  showStatus(disconnected ? "no answer, trying again" : "live", status);
  showNotices();
});
on("data", () => {
  resolveFirstData();
  $("login").hidden = true;
  $("pages").hidden = false;
  render();
});
on("key", (refused) => {
  $("login-error").hidden = !refused;
  $("login").hidden = false;
  $("pages").hidden = true;
  showStatus("key needed");
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keep("watch", $("key").value);
  $("key").value = "";
  follow();
});
for (const button of document.querySelectorAll("[data-seconds]")) {
  button.addEventListener("click", () => {
    for (const each of document.querySelectorAll("[data-seconds]")) each.setAttribute("aria-pressed", String(each === button));
    showWindow(Number(button.dataset.seconds));
  });
}
$("theme").value = document.documentElement.dataset.theme;
$("theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("theme").value;
  localStorage.setItem("osd-theme", $("theme").value);
});
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : follow()));
addEventListener("hashchange", openPage);
openPage();
follow();
