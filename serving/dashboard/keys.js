// Keys that the user entered. They stay in this tab and are sent only to this server.

const NAMES = { watch: "osd-key", admin: "osd-admin-key", chat: "osd-chat-key" };

export const keyFor = (right) => sessionStorage.getItem(NAMES[right]);
export const keep = (right, key) => sessionStorage.setItem(NAMES[right], key);
export const forget = (right) => sessionStorage.removeItem(NAMES[right]);

export function authorization(right) {
  const key = keyFor(right) ?? (right === "chat" ? keyFor("watch") : null);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Returns the error message of a response.
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers with status ${response.status}.`;
  }
}
