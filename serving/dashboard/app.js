// The shell: which page is shown, what the stream says of itself, the key, and the colours.

import { $, h, put, refill } from "./dom.js";
import { clock } from "./format.js";
import { keep } from "./keys.js";
import { Overview } from "./pages/overview.js";
import { follow, on, pause, show as showWindow, store } from "./store.js";

const PAGES = {
  overview: async () => Overview,
  learning: async () => (await import("./pages/learning.js")).Learning,
  traffic: async () => (await import("./pages/traffic.js")).Traffic,
  versions: async () => (await import("./pages/versions.js")).Versions,
  playground: async () => (await import("./pages/playground.js")).Playground,
};
const WITHOUT_WINDOW = ["versions", "playground"];

const made = {};
// Pages are made when the server has said what they show.
let describe;
const described = new Promise((resolve) => (describe = resolve));
let current = null;
let lost = false;

const asked = () => (location.hash.slice(1) in PAGES ? location.hash.slice(1) : "overview");

async function turn() {
  const name = asked();
  const title = name[0].toUpperCase() + name.slice(1);
  put($("title"), title);
  document.title = `${title} · osd`;
  $("window").hidden = WITHOUT_WINDOW.includes(name);
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (current) current.element.hidden = true;
  made[name] ??= Promise.all([PAGES[name](), described]).then(([Page]) => {
    const page = new Page(store.state);
    $("pages").append(page.element);
    return page;
  });
  const page = await made[name];
  page.element.hidden = name !== asked();
  if (page.element.hidden) return;
  current = page;
  render();
}

function render() {
  notices();
  const { state, bins, time, seconds } = store;
  if (!state || !current) return;
  put($("model"), state.model.id);
  document.querySelector('#nav a[href="#playground"]').hidden = !state.answers;
  put($("subtitle"), `domain ${state.domain}, ${state.drafter}, ${state.replicas.length} replica${state.replicas.length === 1 ? "" : "s"}`);
  // A young server's charts begin when it began, but span a minute at least.
  const from = Math.max(time - seconds, Math.min(bins.time[0] ?? time, time - 60));
  current.show({ ...store, span: [from, time] });
}

// What a reader has to know before any figure.
function notices() {
  const { state } = store;
  const said = [];
  if (lost) said.push(["bad", state ? `The server does not answer. What is shown is of ${clock(store.time)}; trying again.` : "The server does not answer yet; trying again."]);
  if (state && !state.stream.redis) said.push(["bad", "Redis does not answer. Requests are served on; nothing is learned, and events and rollout are not known."]);
  if (state && state.drafter === "none") said.push(["", "This service has no drafter: every request decodes plainly."]);
  else if (state?.replicas.length && state.replicas.every(({ speculation }) => !speculation)) said.push(["", "Speculation is switched off: every request decodes plainly."]);
  if (state && !lost && !state.replicas.length) said.push(["bad", "No replica has reported for some seconds."]);
  refill($("notices"), said, () => said.map(([mood, text]) => h("p", { class: `notice ${mood}` }, text)));
}

function status(text, mood = "") {
  put($("status"), text);
  $("status").className = `pill ${mood}`;
}

on("status", (how) => {
  lost = how === "lost";
  status(lost ? "no answer, trying again" : "live", how);
  notices();
});
on("data", () => {
  describe();
  $("login").hidden = true;
  $("pages").hidden = false;
  render();
});
on("key", (refused) => {
  $("login-error").hidden = !refused;
  $("login").hidden = false;
  $("pages").hidden = true;
  status("key needed");
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keep("watch", $("key").value);
  $("key").value = "";
  follow();
});
for (const button of document.querySelectorAll("[data-seconds]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-seconds]")) other.setAttribute("aria-pressed", String(other === button));
    showWindow(Number(button.dataset.seconds));
  });
}
$("theme").value = document.documentElement.dataset.theme;
$("theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("theme").value;
  localStorage.setItem("osd-theme", $("theme").value);
});
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : follow()));
addEventListener("hashchange", turn);
turn();
follow();
