"""Certificates of one set of services: a CA, a server certificate for this machine, and a CA that nobody should trust."""

import shutil

from install import package, run

DAYS = "30"


def make(folder):
    """Makes `ca.pem`, `server.pem` + `server.key`, `server-chain.pem` (key and certificates) and `wrong-ca.pem`."""
    package(lambda: shutil.which("openssl"), "openssl")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "server-chain.pem").exists():
        return

    def openssl(*arguments):
        run("openssl", ["openssl", *arguments], cwd=folder)

    for name in ("ca", "wrong-ca"):
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS, "-subj", f"/CN=gristmill test {name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
    openssl(
        *("req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "server.ext").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
    )
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS),
        *("-out", "server.pem", "-extfile", "server.ext"),
    )
    chain = "".join((folder / name).read_text() for name in ("server.key", "server.pem", "ca.pem"))
    (folder / "server-chain.pem").write_text(chain)
