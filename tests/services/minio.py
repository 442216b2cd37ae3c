"""MinIO, one server over one folder: an S3 store whose put-if-absent has one winner."""

import base64
import datetime
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets

import install
from processes import free_port, spawn, wait_ready

REGION = "us-east-1"
BUCKET = "gristmill"


def prepare():
    install.minio_binary()


def create(folder, certificates):
    """A new store: folder, user, password."""
    del certificates
    (folder / "data").mkdir()
    port = free_port(folder.parent)
    return {
        "address": f"http://127.0.0.1:{port}",
        "key": secrets.token_hex(8),
        "secret": secrets.token_hex(20),
        "bucket": BUCKET,
        "port": port,
        "console_port": free_port(folder.parent),
    }


def start(folder, entry):
    """Starts the store, the first time or again."""
    env = dict(
        os.environ,
        HOME=str(folder),
        MINIO_ROOT_USER=entry["key"],
        MINIO_ROOT_PASSWORD=entry["secret"],
        MINIO_BROWSER="off",
        MINIO_UPDATE="off",
        MINIO_REGION=REGION,
        # A key of the server's own, so that server-side encryption can be asked for.
        MINIO_KMS_SECRET_KEY=entry.setdefault("kms_key", kms_key()),
    )
    addresses = ["--address", f"127.0.0.1:{entry['port']}", "--console-address", f"127.0.0.1:{entry['console_port']}"]
    command = [str(install.minio_binary()), "server", "--quiet", *addresses, str(folder / "data")]
    entry["process"] = spawn(command, folder / "minio.log", env=env, cwd=folder)


def kms_key():
    return "gristmill:" + base64.b64encode(secrets.token_bytes(32)).decode()


def wait(folder, entry):
    """Waits until the store can read and write."""

    def ready():
        connection = http.client.HTTPConnection("127.0.0.1", entry["port"], timeout=5)
        try:
            connection.request("GET", "/minio/health/cluster")
            return connection.getresponse().status == 200
        except http.client.HTTPException:
            return False
        finally:
            connection.close()

    wait_ready("minio", entry["process"], folder / "minio.log", ready)


def finish(folder, entry):
    """Makes the bucket."""
    del folder
    status, answer = signed(entry, "s3", "PUT", f"/{BUCKET}", b"")
    # 409: it is there already, from an earlier start.
    if status not in (200, 409):
        raise install.Unavailable(f"minio refuses to make a bucket: {status} {answer[:200]!r}")


def session(entry):
    """Temporary credentials, as MinIO's own STS gives them out: a JSON object in the form of AWS's metadata services."""
    body = b"Action=AssumeRole&Version=2011-06-15&DurationSeconds=900"
    status, answer = signed(entry, "sts", "POST", "/", body)
    if status != 200:
        raise install.Unavailable(f"minio gives no session: {status} {answer[:200]!r}")
    found = {name: re.search(f"<{name}>([^<]*)<", answer.decode())[1] for name in (*SESSION, "Expiration")}
    return json.dumps({SESSION.get(name, name): value for name, value in found.items()})


# Names in STS's answer, and in the answers of metadata services.
SESSION = {"AccessKeyId": "AccessKeyId", "SecretAccessKey": "SecretAccessKey", "SessionToken": "Token"}


def signed(entry, service, method, path, body):
    """Sends a request with AWS's signature, version 4; its status and body."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    day, host = now[:8], f"127.0.0.1:{entry['port']}"
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    if body:
        headers = {"content-type": "application/x-www-form-urlencoded", **headers}
    names = ";".join(headers)
    request = "\n".join([method, path, "", *(f"{n}:{v}" for n, v in headers.items()), "", names, digest])
    scope = f"{day}/{REGION}/{service}/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{entry['secret']}".encode()
    for part in (day, REGION, service, "aws4_request", to_sign):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={entry['key']}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    )
    connection = http.client.HTTPConnection("127.0.0.1", entry["port"], timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def exports(entry):
    return {
        "GRISTMILL_TEST_S3": entry["address"],
        "GRISTMILL_TEST_S3_KEY": entry["key"],
        "GRISTMILL_TEST_S3_SECRET": entry["secret"],
        "GRISTMILL_TEST_S3_BUCKET": entry["bucket"],
    }
