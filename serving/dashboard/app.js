// Asks for data every other second and shows it.

import { Chart, fixed, percent } from "./charts.js";
import * as panels from "./panels.js";

const PERIOD = 1500;
const KEY = "osd-key";
const $ = (id) => document.getElementById(id);

const fromZero = (least) => (_, high) => [0, Math.max(least, 1.15 * (high ?? 0))];
const charts = {
  acceptance: new Chart("chart-acceptance", {
    ink: "--one", format: percent, label: (value) => `${Math.round(100 * value)} %`, range: () => [0, 1], empty: "No round has drafted yet.",
  }),
  length: new Chart("chart-length", {
    ink: "--two", format: fixed(2), range: (_, high) => [1, Math.max(2, 1.1 * (high ?? 0))], empty: "No round has drafted yet.",
  }),
  speed: new Chart("chart-speed", {
    ink: "--three", format: fixed(0), range: fromZero(10), empty: "No traffic yet: send a request to /v1/chat/completions.",
  }),
  loss: new Chart("chart-loss", {
    ink: "--four", format: fixed(2), range: fromZero(0.1), empty: "The trainer has not made a step yet.",
  }),
};

let seconds = 900;
let timer = null;
let asking = null;

function status(text, mood = "") {
  $("status").textContent = text;
  $("status").className = `pill ${mood}`;
}

function show(data) {
  const { history } = data;
  $("login").hidden = true;
  $("main").hidden = false;
  $("model").textContent = data.model.id;
  $("subtitle").textContent = `domain ${data.domain}, drafter ${data.drafter}, ${data.replicas.length} replica${data.replicas.length === 1 ? "" : "s"}`;
  // A young server's chart begins when it began, but spans a minute at least.
  const from = Math.max(data.time - seconds, Math.min(history.time[0] ?? data.time, data.time - 60));
  const span = [from, data.time];
  const busy = history.tokens_per_second.some((value) => value > 0);
  charts.acceptance.show(history.time, history.acceptance_rate, history.swaps, span);
  charts.length.show(history.time, history.mean_acceptance_length, history.swaps, span);
  charts.speed.show(history.time, busy ? history.tokens_per_second : history.time.map(() => null), history.swaps, span);
  const steps = data.events.filter((event) => event.kind === "train_step" && event.time >= from && event.loss != null);
  charts.loss.show(steps.map((step) => step.time), steps.map((step) => step.loss), history.swaps, span);
  for (const panel of Object.values(panels)) panel(data);
  status("live", "live");
}

async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  asking = new AbortController();
  const key = sessionStorage.getItem(KEY);
  try {
    const response = await fetch(`/dashboard/data?seconds=${seconds}`, {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.any([asking.signal, AbortSignal.timeout(10000)]),
    });
    if (response.status === 401 || response.status === 403) {
      $("login-error").hidden = key === null;
      sessionStorage.removeItem(KEY);
      $("login").hidden = false;
      $("main").hidden = true;
      status("key needed");
      return;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
  } catch (error) {
    if (error.name === "AbortError") return;
    console.error(error);
    status("no answer, trying again", "lost");
  }
  timer = setTimeout(refresh, document.hidden ? 4 * PERIOD : PERIOD);
}

for (const button of document.querySelectorAll("[data-seconds]")) {
  button.addEventListener("click", () => {
    seconds = Number(button.dataset.seconds);
    for (const other of document.querySelectorAll("[data-seconds]")) other.setAttribute("aria-pressed", other === button);
    refresh();
  });
}
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  refresh();
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
refresh();
