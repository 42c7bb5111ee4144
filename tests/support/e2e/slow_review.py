"""The server of `slow_webhook.py`, run in a pod: allows what it is asked, `sys.argv[1]` seconds later, over TLS.

The standard library alone, since the pod has an image that happens to be on the nodes. It says a line for each review:
the name of the object, and how many reviews waited then.
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8443
CERTIFICATES = "/certificates"

counting = threading.Lock()
waiting: set[int] = set()  # threads that have not answered yet


class Review(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        with counting:
            waiting.add(threading.get_ident())
            print(f"review {asked['namespace']} {asked.get('name') or '-'} waiting {len(waiting)}", flush=True)
        time.sleep(float(sys.argv[1]))
        with counting:
            waiting.discard(threading.get_ident())
        answer = {"uid": asked["uid"], "allowed": True}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Its own line is enough."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the API server opens a connection for each review that waits


def main() -> None:
    server = Server(("", PORT), Review)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(f"{CERTIFICATES}/tls.crt", f"{CERTIFICATES}/tls.key")
    # The handshake is done in the request's own thread, so that a connection that says nothing holds up nobody.
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    main()
