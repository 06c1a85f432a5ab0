// Helpers for elements of the page. They insert text as text, never as HTML.

export const $ = (id) => document.getElementById(id);

// Creates an element: h("p", { class: "note", onclick: f }, "text", element, null).
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Sets the text of an element only if it changes, so that the user's selection survives.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Replaces the children of an element only if `state` differs from the last call.
export function refill(element, state, make) {
  const key = JSON.stringify(state);
  if (element._key === key) return;
  element._key = key;
  element.replaceChildren(...[make()].flat());
}
