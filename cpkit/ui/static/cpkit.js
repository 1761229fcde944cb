// Keys, local times and live updates. Reading and deciding work without this file.
"use strict";

const rows = () => [...document.querySelectorAll("[data-row]")];
let selected = -1;

function select(index) {
  const all = rows();
  if (!all.length) return;
  selected = Math.max(0, Math.min(index, all.length - 1));
  all.forEach((row, at) => row.classList.toggle("selected", at === selected));
  all[selected].scrollIntoView({ block: "nearest" });
}

function follow(row, selector) {
  const link = row && row.querySelector(selector);
  if (link) link.click();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, button, a, summary")) return;
  const row = rows()[selected];

  if (event.key === "j") select(selected + 1);
  else if (event.key === "k") select(selected - 1);
  else if (event.key === "Enter") follow(row, "a, summary");
  else if (event.key === "a" || event.key === "d") follow(row, `[data-key=${event.key}]`);
});

// The link that chose approve or deny focuses the button; Enter confirms.
const choice = new URLSearchParams(location.search).get("choose");
if (choice === "approve" || choice === "deny") {
  const button = document.querySelector(`.decide button[value=${choice}]`);
  if (button) button.focus();
}

for (const keys of document.querySelectorAll(".keys")) keys.hidden = !rows().length;

// Times are UTC in the page, and on hover. A browser knows the person's time zone.
function localize(root) {
  for (const one of root.querySelectorAll("time.local")) {
    const at = new Date(one.dateTime);
    if (isNaN(at)) continue;
    const local = new Date(at - at.getTimezoneOffset() * 60000);
    one.textContent = local.toISOString().slice(0, 19).replace("T", " ");
  }
}

localize(document);

// Live: after a change, load this page again and replace its live parts.
async function reload() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  localize(fresh);
  const height = document.body.scrollHeight;
  const atEnd = innerHeight + scrollY >= height - 80;

  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    if (!next || next.innerHTML === part.innerHTML) continue;

    const toggled = new Map(
      [...part.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
    next.querySelectorAll("details[id]").forEach((one) => {
      if (toggled.has(one.id)) one.open = toggled.get(one.id);
    });
    part.replaceWith(next);
  }

  if (selected >= 0) select(selected);
  const grew = document.body.scrollHeight > height;
  if (atEnd && grew && location.search.indexOf("start=") < 0) scrollTo(0, document.body.scrollHeight);
}

const place = document.body.dataset.events;
const live = document.getElementById("live");

if (place && document.querySelector("main [data-live]")) {
  let running = false, again = false;

  async function change() {
    if (running) { again = true; return; }
    running = true;
    do { again = false; await reload().catch(() => {}); } while (again);
    running = false;
  }

  // A browser opens six connections to a host. Those of hidden tabs would leave none for
  // a click. The first event, at once, makes a tab that is shown again catch up.
  let source = null;

  function listen() {
    if (source) return;
    source = new EventSource(place);
    source.addEventListener("change", change);
    source.onopen = () => { live.textContent = "live"; };
    source.onerror = () => { live.textContent = "connection lost, trying again"; };
  }

  function stop() {
    if (source) source.close();
    source = null;
  }

  function follow() {
    if (document.visibilityState === "visible") listen(); else stop();
  }

  document.addEventListener("visibilitychange", follow);
  addEventListener("pageshow", follow);
  addEventListener("pagehide", stop);
  follow();
}
