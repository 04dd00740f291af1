// What all views use of the page around them: the status, the snapshot, errors, who is asking.

import { token } from "./api.js";
import { $, put } from "./dom.js";
import { count } from "./format.js";

let heard = 0;

export function status(kind, text) {
  $("light").className = `light ${kind}`;
  put($("status-text"), text);
}

export function snapshot(ts) {
  heard = performance.now();
  put($("snapshot"), ts === null ? "–" : count(ts));
  age();
}

function age() {
  const seconds = (performance.now() - heard) / 1000;
  put($("age"), $("snapshot").textContent === "–" || $("status-text").textContent === "the past" || seconds < 2 ? "" : `, ${Math.round(seconds)} s old`);
}
setInterval(age, 1000);

const sentence = (text) => {
  const said = text.startsWith("kivi ") ? text : text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(said) ? said : `${said}.`;
};

export function trouble(text) {
  put($("error"), text === null ? "" : sentence(text));
  $("error").hidden = text === null;
}

// What was read is of the newest snapshot.
export function read(ts) {
  trouble(null);
  $("main").classList.remove("stale");
  status("live", "live");
  snapshot(ts);
}

const lost = (error) => {
  status("bad", "reconnecting");
  $("main").classList.add("stale");
  trouble(`${error.message}; trying again`);
};

// Calls `look` at once and again and again; what ends that.
export function polling(look, everyMs) {
  const once = async () => {
    try {
      await look();
    } catch (error) {
      (error.passes ? lost : failed)(error);
    }
    $("main").setAttribute("aria-busy", "false");
  };
  once();
  const timer = setInterval(once, everyMs);
  return () => clearInterval(timer);
}

// What a view tells of what it reads: `follow`'s callbacks, so that every state is shown the same way.
export function listening({ shown, pastOf = null }) {
  return {
    begun: () => {},
    shown: (rows, ts) => {
      trouble(null);
      $("main").classList.remove("stale");
      $("main").setAttribute("aria-busy", "false");
      status(pastOf === null ? "live" : "past", pastOf === null ? "live" : "the past");
      shown(rows, ts);
    },
    fresh: snapshot,
    lost,
    failed: (error) => failed(error),
  };
}

export function failed(error) {
  $("main").setAttribute("aria-busy", "false");
  if (error.status === 401) {
    status("bad", "no access");
    trouble(null);
    return askToken(token.get() ? "The server does not know this token, or it was withdrawn." : "This server asks who you are.");
  }
  status("bad", error.status === 403 ? "no access" : "not shown");
  const isPast = error.reason === "SnapshotTooOld"; // that does not pass
  trouble(error.passes && !isPast ? `${error.message}; load the page again in a moment` : error.message);
  if (error.status === 403) $("token").hidden = false;
  snapshot(null);
  $("main").classList.add("stale");
}

export function askToken(why) {
  put($("token-why"), why);
  $("token").hidden = false;
  if (!$("token-dialog").open) $("token-dialog").showModal();
  $("token-input").focus();
}
