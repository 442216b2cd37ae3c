"""The known function of fault runs, written down a second time, and how their files are reached. No code of gristmill."""

import hashlib
import os
import struct
import urllib.parse

from pyarrow import fs

# A prompt that begins with it ends the process that computes it.
ABORT_ID = 2047
# A prompt that begins with it has no value.
ERROR_ID = 2046
# Ids of ordinary prompts are below this.
ORDINARY_IDS = 2000
# The demo model's.
VOCABULARY = 2048


def value(ids, completion_tokens):
    """The completion of a prompt and its token ids; `None` where there is none."""
    if not ids or any(i is None or not 0 <= i < VOCABULARY for i in ids):
        return None
    if ids[0] in (ABORT_ID, ERROR_ID):
        return None
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).digest()
    words = struct.unpack("<16H", digest)
    return f"k-{digest[:8].hex()}", [words[i % 16] % 2000 for i in range(completion_tokens)]


def filesystem(url, endpoint):
    """The file system of a folder or an `s3://` URL, and the path there."""
    parts = urllib.parse.urlparse(url)
    if parts.scheme != "s3":
        return fs.LocalFileSystem(), os.path.abspath(url)
    target = urllib.parse.urlparse(endpoint or "")
    store = fs.S3FileSystem(
        endpoint_override=target.netloc or None,
        scheme=target.scheme or "https",
        region=os.environ.get("AWS_REGION", "us-east-1"),
        access_key=os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
        # Small objects by a plain put, whose ETag is the same each time.
        allow_delayed_open=True,
    )
    return store, (parts.netloc + parts.path).rstrip("/")
