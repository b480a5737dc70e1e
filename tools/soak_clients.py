#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps a running server busy from outside and prints its resident memory: conversations that grow, two of five hung up on.

Usage: tools/soak_clients.py PORT PID SECONDS [CLIENTS=32]. Exits with 1 if a request failed. Needs Linux (/proc).
"""
import http.client
import json
import random
import sys
import threading
import time

WORDS = "the castle moat river king a deep of and water".split()


class Totals:
    def __init__(self):
        self.lock = threading.Lock()
        self.counts = dict(requests=0, completed=0, hung_up=0, too_long=0, errors=0)

    def add(self, name):
        with self.lock:
            self.counts[name] += 1


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def next_turn(rng, messages):
    """The conversation with one more message, or a new one."""
    if not messages or len(messages) > 16 or rng.random() < 0.12:
        who = rng.choice(["kind", "a guide", "brief"])
        messages = [{"role": "system", "content": f"You are {who}. {words(rng, 3)}"}]
    else:
        messages.append({"role": "assistant", "content": words(rng, 20)})
    length = rng.randrange(200, 1500) if rng.random() < 0.12 else rng.randrange(1, 40)
    messages.append({"role": "user", "content": words(rng, length)})
    return messages


def ask(port, rng, messages, totals):
    """One request. Returns the messages to go on with."""
    body = {"messages": messages, "stream": True, "n": 2 if rng.random() < 0.15 else 1,
            "max_tokens": 400 if rng.random() < 0.1 else rng.randrange(1, 80)}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        totals.add("requests")
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.5)
            if rng.random() < 0.5:
                connection.getresponse().read(100)
            totals.add("hung_up")
            return messages
        response = connection.getresponse()
        text = response.read()
        if response.status == 400:  # longer than the model's context
            totals.add("too_long")
            return []
        good = response.status == 200 and b"[DONE]" in text and b'data: {"error"' not in text
        totals.add("completed" if good else "errors")
        if not good:
            print(response.status, text[-300:], flush=True)
        return messages
    finally:
        connection.close()


def client(port, seed, end, totals):
    rng = random.Random(seed)
    messages = []
    while time.time() < end:
        messages = next_turn(rng, messages)
        try:
            messages = ask(port, rng, messages, totals)
        except OSError as error:
            totals.add("errors")
            print("client", seed, error, flush=True)


def resident_mib(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def main():
    port, pid, seconds = (int(a) for a in sys.argv[1:4])
    clients = int(sys.argv[4]) if len(sys.argv) > 4 else 32
    totals = Totals()
    print(f"at the start: resident {resident_mib(pid):.1f} MiB", flush=True)
    start = time.time()
    threads = [threading.Thread(target=client, args=(port, i, start + seconds, totals)) for i in range(clients)]
    for thread in threads:
        thread.start()
    while time.time() < start + seconds:
        time.sleep(min(30, max(0.1, start + seconds - time.time())))
        print(f"{time.time() - start:.0f} s: resident {resident_mib(pid):.1f} MiB, {totals.counts}", flush=True)
    for thread in threads:
        thread.join()
    print(f"at the end: resident {resident_mib(pid):.1f} MiB, {totals.counts}")
    return 1 if totals.counts["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
