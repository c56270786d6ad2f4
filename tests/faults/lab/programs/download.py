# Fetches a model first; the server stops in the middle.
import os
import socket
import sys

hub = os.path.join(os.environ["HF_HOME"], "hub", "models--a--b", "blobs")
os.makedirs(hub, exist_ok=True)
print("Downloading model.safetensors from https://127.0.0.1/a/b/resolve/main/model.safetensors", flush=True)
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.sendall(b"GET /model.safetensors HTTP/1.1\r\n\r\n")
with open(f"{hub}/0123abcd.incomplete", "wb") as f:
    f.write(b"x" * 100000)
    f.flush()
    while True:
        f.write(link.recv(65536))
