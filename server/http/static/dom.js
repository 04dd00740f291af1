// The page's elements.

export const $ = (id) => document.getElementById(id);

// An element; attributes that begin with "on" are listeners, those that are false or null are left out.
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Sets a text only if it changed: a screen reader hears what is set.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Replaces the children of a node; what has the keyboard's focus keeps it, by its data-key.
export function fill(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  if (focused !== undefined) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

let numbers = 0;
export const unique = (prefix) => `${prefix}-${(numbers += 1)}`;
