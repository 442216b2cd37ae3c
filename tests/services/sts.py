"""A token service as EKS pods have it: takes a web identity token over HTTPS, gives a session of MinIO.

Each session claims to end in 30 s, so that clients come again; each request is told on stdout: `token ACCESS_KEY_ID`.
"""

import datetime
import http.server
import json
import ssl
from urllib.parse import parse_qs, urlsplit

import minio
from processes import free_port

ANSWER = """<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{AccessKeyId}</AccessKeyId><SecretAccessKey>{SecretAccessKey}</SecretAccessKey>
<SessionToken>{Token}</SessionToken><Expiration>{Expiration}</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def serve(folder, entry):
    """Serves until killed; its address is the first line on stdout."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = parse_qs(urlsplit(self.path).query)
            assert asked["Action"] == ["AssumeRoleWithWebIdentity"], asked
            session = json.loads(minio.session(entry))
            ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=30)
            session["Expiration"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
            body = ANSWER.format(**session).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            print(asked["WebIdentityToken"][0], session["AccessKeyId"], flush=True)

        def log_message(self, *_):
            pass

    port = free_port(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificates" / "server-chain.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print(f"https://localhost:{port}", flush=True)
    server.serve_forever()
