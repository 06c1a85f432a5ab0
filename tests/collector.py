"""OpenTelemetry collector that accepts traces over HTTP."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Collector that stores the bodies and paths of all requests."""

    def __init__(self, port=0):
        self.bodies, self.paths, collector = [], [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                collector.paths.append((self.path, self.headers["content-type"]))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self):
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [resource for request in requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def resource(self):
        (resource, *_) = ExportTraceServiceRequest.FromString(self.bodies[0]).resource_spans
        return attributes_of(resource.resource)


def attributes_of(span):
    def value(any_value):
        kind = any_value.WhichOneof("value")
        content = getattr(any_value, kind)
        return [value(item) for item in content.values] if kind == "array_value" else content

    return {attribute.key: value(attribute.value) for attribute in span.attributes}
