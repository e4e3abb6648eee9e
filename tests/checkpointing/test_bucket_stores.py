# SPDX-License-Identifier: Apache-2.0
"""Buckets in other people's servers: moto's S3 and, where AZURITE is the path of its program, Azurite's blobs."""

import os
import socket
import subprocess
import time

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import verify
from accelerate.core.buckets import PART_SIZE, Bucket
from accelerate.core.files import location

pytest.importorskip("obstore")

AZURITE = os.environ.get("AZURITE", "")
# Azurite's own account, which is no secret.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@pytest.fixture
def s3_of_moto(monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield "s3://bucket"
    server.stop()


@pytest.fixture
def blobs_of_azurite(monkeypatch, tmp_path):
    if not AZURITE:
        pytest.skip("AZURITE is not set")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    options = ["--blobPort", str(port), "--location", str(tmp_path), "--skipApiVersionCheck"]
    variables = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([AZURITE, *options], stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        make_container(port)
        yield "az://bucket"
        server.terminate()


def make_container(port):
    """By a request that is signed here: obstore makes no containers."""
    import base64
    import email.utils
    import hashlib
    import hmac
    import urllib.request

    headers = {
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": "2021-08-06",
    }
    text = "PUT" + "\n" * 12
    text += "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text += f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    key = base64.b64decode(ACCOUNT_KEY)
    signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/bucket?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers, data=None)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201


def check_store(url):
    """What checkpoints need of a store, and one run."""
    bucket, _ = Bucket.of(url)
    content = os.urandom(PART_SIZE * 2 + 77)
    bucket.write("folder/big", [memoryview(content)[:100], memoryview(content)[100:]])
    bucket.write("folder/a b+é%20/x", [b"1"])
    target = bytearray(len(content) - 9)
    bucket.read("folder/big", 9, [memoryview(target)])
    assert target == content[9:] and bucket.stat("folder/big").size == len(content)
    assert bucket.create("m", b"1", lambda data: data == b"1")
    assert not bucket.create("m", b"2", lambda data: data == b"2")
    version = bucket.version("m")
    assert bucket.replace("m", b"33", version, lambda data: data == b"33")
    assert not bucket.replace("m", b"44", version, lambda data: data == b"44")
    assert bucket.get("m", 9) == b"33"
    assert {entry.key for entry in bucket.objects("folder")} == {
        "folder/big",
        "folder/a b+é%20/x",
    }
    assert bucket.children("folder")[0] == ["a b+é%20"]
    bucket.delete(["folder/big", "none", "folder/a b+é%20/x"])
    assert not list(bucket.objects("folder"))
    with pytest.raises(FileNotFoundError):
        bucket.get("folder/big", 9)

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    saved = model.weight.detach().clone()
    for _ in range(2):
        accelerator.save_state(f"{url}/run/a")
        verify(location(f"{url}/run/a", "folder"))
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(f"{url}/run/a")
    assert torch.equal(model.weight, saved)
    folders, _ = bucket.children("run/a")
    assert len(folders) == 1


@pytest.mark.thorough
def test_moto(s3_of_moto):
    check_store(s3_of_moto)


@pytest.mark.thorough
def test_azurite(blobs_of_azurite):
    check_store(blobs_of_azurite)


def test_gcs_is_opened_as_its_client_is_configured(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    bucket, key = Bucket.of("gs://bucket/run")
    assert type(bucket.store).__name__ == "GCSStore" and key == "run"
    assert bucket.store.config["bucket"] == "bucket"
