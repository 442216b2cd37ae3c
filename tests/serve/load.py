#!/usr/bin/env python3
"""Loads `gristmill serve` as many clients do at once, and says what it took in time and memory.

    .venv/bin/python tests/serve/load.py PROGRAM [--only CASE] [--store URL]

Not a part of `tests/check.sh`: it takes some 15 minutes and 10 GB of disk. With a store in a bucket, the credentials are in the environment.
The last line counts the cases; `--json FILE` writes the figures. tests/README.md has those of the last run.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import pathlib
import resource
import socket
import sys
import tempfile
import threading
import time
import uuid

import httpx2 as httpx

from run import check_answers, request, service, submit, tickets, until, wait

MIB = 1 << 20
BLOCK = os.urandom(MIB)


class Content(io.RawIOBase):
    """`size` bytes that no other `seed` has, made as they are read."""

    def __init__(self, size, seed):
        self.size, self.seed, self.at, self.hash = size, seed.to_bytes(8, "little"), 0, hashlib.sha256()

    def readable(self):
        return True

    def readinto(self, buffer):
        block = self.seed + (self.at // MIB).to_bytes(8, "little") + BLOCK[16:]
        offset = self.at % MIB
        count = min(len(buffer), MIB - offset, self.size - self.at)
        buffer[:count] = block[offset : offset + count]
        self.hash.update(buffer[:count])
        self.at += count
        return count


def memory_of(process):
    """Bytes that a process holds now, and the most that it held since the last call."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    now, most = (int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) * 1024 for name in ["VmRSS:", "VmHWM:"])
    pathlib.Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return now, most


def mib(bytes):
    return round(bytes / MIB)


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def batches_at_once(program, args):
    """200 batches, created by 20 threads of OpenAI's client, of 20 requests each."""
    with service(program, store=args.store) as one:
        client = one.client()
        files = []
        for number in range(200):
            rows = [(f"{number}-{id}", text) for id, text, _ in tickets(20)]
            files.append([request(id, text) for id, text in rows])
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            batches = list(threads.map(lambda lines: submit(client, lines), files))
            created = time.monotonic() - begun
            ended = list(threads.map(lambda batch: wait(client, batch, 600), batches))
        took = time.monotonic() - begun
        for batch, lines in zip(ended, files):
            assert batch.status == "completed", batch
            answers, errors = check_answers(client, batch, lines)
            assert len(answers) == 20 and not errors
        now, most = memory_of(one.process)
        return {"created_in_s": round(created, 1), "ended_in_s": round(took, 1), "most_mib": mib(most)}


def status_reads(program, args):
    """10,000 reads of batches and lists within a minute while a batch runs, and the same batch undisturbed."""
    count, threads_count = 10_000, 8
    with service(program, store=args.store) as one:
        client = one.client()
        lines = [request(id, text) for id, text, _ in tickets(5_000)]

        def seconds(reading):
            batch = submit(client, lines)
            until("the batch runs", lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
            done = reading(batch.id)
            ended = wait(client, batch, 900)
            check_answers(client, ended, lines)
            return ended.finalizing_at - ended.in_progress_at, done

        alone, _ = seconds(lambda id: None)

        def read_all(id):
            latencies, gate = [], threading.Lock()
            begun = time.monotonic()
            next_number = iter(range(count))

            def reader():
                with httpx.Client(base_url=one.url, timeout=30) as http:
                    while True:
                        with gate:
                            number = next(next_number, None)
                        if number is None:
                            return
                        # Evenly over a minute, so that the rate is the promised one and no more.
                        time.sleep(max(0.0, begun + number * 55 / count - time.monotonic()))
                        path = "/v1/batches?limit=20" if number % 10 == 0 else f"/v1/batches/{id}"
                        asked = time.monotonic()
                        response = http.get(path)
                        latencies.append(time.monotonic() - asked)
                        assert response.status_code == 200, response.text

            with concurrent.futures.ThreadPoolExecutor(threads_count) as threads:
                for future in [threads.submit(reader) for _ in range(threads_count)]:
                    future.result()
            return latencies, time.monotonic() - begun

        beside, (latencies, took) = seconds(read_all)
        assert len(latencies) == count and took < 60, (len(latencies), took)
        return {
            "reads": count, "in_s": round(took, 1), "p50_ms": round(percentile(latencies, 0.5) * 1000, 1),
            "p99_ms": round(percentile(latencies, 0.99) * 1000, 1), "batch_alone_s": alone, "batch_beside_s": beside,
        }


def silent_connections(program, args):
    """1,000 connections that send nothing, 200 with half a header, 50 with a byte of a body per second: others are answered, these are closed."""
    with service(program, store=args.store) as one, contextlib.ExitStack() as ends:
        before, _ = memory_of(one.process)
        port = one.port

        def connect(sent=b""):
            connection = ends.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            connection.sendall(sent)
            return connection

        begun = time.monotonic()
        silent = [connect() for _ in range(1_000)]
        half = [connect(b"GET /v1/batches HTTP/1.1\r\nhost: x\r\nx-half: ") for _ in range(200)]
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n"
        slow = [connect(head) for _ in range(50)]
        latencies = []
        with httpx.Client(base_url=one.url, timeout=10) as http:
            for number in range(20):
                asked = time.monotonic()
                assert http.get("/v1/batches").status_code == 200
                latencies.append(time.monotonic() - asked)
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"-")
                time.sleep(1)
        descriptors = len(os.listdir(f"/proc/{one.process.pid}/fd"))
        _, most = memory_of(one.process)

        def is_closed(connection):
            connection.setblocking(False)
            try:
                return connection.recv(4096) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        open_ones = list(silent + half)
        until("silent connections are closed", lambda: not open_ones.__setitem__(slice(None), [c for c in open_ones if not is_closed(c)]) and not open_ones, 120)
        closed_after = time.monotonic() - begun
        assert max(latencies) < 1, latencies
        return {
            "worst_answer_ms": round(max(latencies) * 1000), "descriptors": descriptors, "closed_after_s": round(closed_after),
            "before_mib": mib(before), "most_mib": mib(most),
        }


def upload(one, size, seed, client):
    content = Content(size, seed)
    body = multipart(io.BufferedReader(content, MIB), f"{seed}.jsonl")
    headers = {"content-type": "multipart/form-data; boundary=gristmill-load"}
    response = client.post("/v1/files", content=body, headers=headers)
    assert response.status_code == 200, response.text
    file = response.json()
    assert file["bytes"] == size, file
    return file["id"], content.hash.hexdigest()


def multipart(file, name):
    """The body that OpenAI's client sends, made as it is sent."""
    yield b'--gristmill-load\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield f'--gristmill-load\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    while block := file.read(MIB):
        yield block
    yield b"\r\n--gristmill-load--\r\n"


def check_content(client, id, expected):
    hash = hashlib.sha256()
    with client.stream("GET", f"/v1/files/{id}/content") as response:
        assert response.status_code == 200, response.status_code
        for block in response.iter_bytes(MIB):
            hash.update(block)
    assert hash.hexdigest() == expected, "the content that comes back is another one"


def large_uploads(program, args):
    """2 GB in one request, and 2 GB by eight clients at once; what comes back is the same."""
    figures = {}
    with service(program, store=args.store) as one:
        with httpx.Client(base_url=one.url, timeout=600) as client:
            memory_of(one.process)
            begun = time.monotonic()
            id, hash = upload(one, 2 * 1024 * MIB, 1, client)
            figures |= {"one_s": round(time.monotonic() - begun, 1), "one_mib": mib(memory_of(one.process)[1])}
            check_content(client, id, hash)
            figures["read_back_mib"] = mib(memory_of(one.process)[1])
            client.delete(f"/v1/files/{id}").raise_for_status()

        def another(seed):
            with httpx.Client(base_url=one.url, timeout=600) as client:
                id, hash = upload(one, 256 * MIB, seed, client)
                check_content(client, id, hash)

        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            list(threads.map(another, range(2, 10)))
        return figures | {"eight_s": round(time.monotonic() - begun, 1), "eight_mib": mib(memory_of(one.process)[1])}


def upload_in_parts(program, args):
    """1 GB by the client's own `upload_file_chunked`, in parts of 64 MB."""
    size = 1024 * MIB
    with service(program, store=args.store) as one, tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        content = Content(size, 99)
        with io.BufferedReader(content, MIB) as blocks:
            while block := blocks.read(MIB):
                file.write(block)
        file.flush()
        memory_of(one.process)
        begun = time.monotonic()
        upload = one.client().uploads.upload_file_chunked(file=pathlib.Path(file.name), mime_type="application/jsonl", purpose="batch")
        took = time.monotonic() - begun
        assert upload.status == "completed" and upload.file.bytes == size, upload
        most = memory_of(one.process)[1]
        with httpx.Client(base_url=one.url, timeout=600) as client:
            check_content(client, upload.file.id, content.hash.hexdigest())
        return {"upload_s": round(took, 1), "most_mib": mib(most)}


def slow_readers(program, args):
    """50 clients that begin to download 256 MB and read nothing for 20 s: memory stays, and others are served."""
    with service(program, store=args.store) as one, contextlib.ExitStack() as ends:
        with httpx.Client(base_url=one.url, timeout=600) as client:
            id, hash = upload(one, 256 * MIB, 7, client)
            before, _ = memory_of(one.process)
            for _ in range(50):
                connection = ends.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=10))
                connection.sendall(f"GET /v1/files/{id}/content HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            latencies = []
            for _ in range(20):
                asked = time.monotonic()
                assert client.get("/v1/batches").status_code == 200
                latencies.append(time.monotonic() - asked)
                time.sleep(1)
            _, most = memory_of(one.process)
            check_content(client, id, hash)
            assert max(latencies) < 1, latencies
            assert most - before < 512 * MIB, (mib(before), mib(most))
            return {"before_mib": mib(before), "most_mib": mib(most), "worst_answer_ms": round(max(latencies) * 1000)}


CASES = [batches_at_once, status_reads, silent_connections, large_uploads, upload_in_parts, slow_readers]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in CASES])
    parser.add_argument("--store", help="below this URL instead of a folder")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    prefix = args.store
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    program = str(pathlib.Path(args.program).resolve())
    chosen = [case for case in CASES if not args.only or case.__name__ in args.only]
    figures, right = {}, 0
    for case in chosen:
        if prefix:
            args.store = f"{prefix}/{case.__name__}-{uuid.uuid4().hex[:8]}"
        try:
            figures[case.__name__] = case(program, args)
        except Exception as error:
            print(f"{case.__name__}: WRONG: {type(error).__name__}: {error}", flush=True)
            continue
        right += 1
        print(f"{case.__name__}: right: {json.dumps(figures[case.__name__])}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{right} of {len(chosen)} cases right")
    return right != len(chosen)


if __name__ == "__main__":
    sys.exit(main())
