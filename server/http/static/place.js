// Where we are: the address says it, so that it can be kept and sent. #/endpoints?range=1h&k.service=shop

export const place = { view: "", name: "", range: "1h", asOf: null, compare: false, keys: {}, more: {} };

// A % that a person typed, and that begins nothing, is itself.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function read() {
  const [path, text] = location.hash.replace(/^#/, "").split("?");
  const [view = "", name = ""] = path.replace(/^\//, "").split("/").map(decoded);
  const query = new URLSearchParams(text ?? "");
  Object.assign(place, { view, name, range: "1h", asOf: null, compare: false, keys: {}, more: {} });
  for (const [key, value] of query) {
    if (key === "range") place.range = value;
    else if (key === "as_of") place.asOf = value;
    else if (key === "compare") place.compare = value === "1w";
    else if (key.startsWith("k.")) place.keys[key.slice(2)] = value;
    else place.more[key] = value;
  }
}

// The address of another place: the range and the moment go along, the keys do not.
export function link(view, name = "", { keys = {}, more = {}, ...change } = {}) {
  const { range, asOf, compare } = { ...place, ...change };
  const query = new URLSearchParams();
  if (range !== "1h") query.set("range", range);
  if (asOf !== null) query.set("as_of", asOf);
  if (compare) query.set("compare", "1w");
  for (const [key, value] of Object.entries(keys)) query.set(`k.${key}`, value);
  for (const [key, value] of Object.entries(more)) query.set(key, value);
  const text = query.toString();
  return `#/${[view, name].filter(Boolean).map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export const here = (change) => link(place.view, place.name, { keys: place.keys, more: place.more, ...change });
export const go = (address) => { location.hash = address; };
