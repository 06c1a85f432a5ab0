// Reader of server-sent events; the browser's EventSource cannot send a key.

// Yields { event, id, data } for each event.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) yield parsed(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(part) {
  const fields = { event: "message", id: null, data: "" };
  for (const line of part.split("\n")) {
    const at = line.indexOf(":");
    if (at > 0 && line.slice(0, at) in fields) fields[line.slice(0, at)] = line.slice(at + 1).trimStart();
  }
  return fields;
}
