# SPDX-License-Identifier: Apache-2.0
"""What a run reports to the server of a Kubeflow TrainJob: over TLS, with the newest token, from rank 0 alone."""

import json
import math
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ranks import run_ranks

from accelerate.telemetry.job_status import trainer_status
from accelerate.telemetry.status import TRAINING, Status

# A plain loop; rank 0 goes on when the server has the reports that are counted in a file.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
rank, answers = os.environ["RANK"], Path(sys.argv[1])
if rank == "0":
    from accelerate.telemetry import job_status
    job_status._INTERVAL = 0.05
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
step = 0
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        while rank == "0" and step < 5 and not (answers / str(step)).exists():
            time.sleep(0.01)
assert rank == "0" or "accelerate.telemetry.job_status" not in sys.modules
"""


class Server(ThreadingHTTPServer):
    """Notes the reports and their tokens. The token changes after the first report, and the third and fourth fail."""

    def __init__(self, folder):
        super().__init__(("localhost", 0), Handler)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-keyout", folder / "key", "-out", folder / "ca.crt", "-days", "1", "-subj", "/CN=localhost"]
            # Python 3.13 wants the use of a certificate's key in it.
            + ["-addext", "subjectAltName=DNS:localhost", "-addext", "keyUsage=critical,digitalSignature,keyCertSign"],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.folder = folder
        self.reports = []
        self.variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.server_port}/namespaces/n/trainjobs/j/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }
        (folder / "token").write_text("1\n")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reports, folder = self.server.reports, self.server.folder
        reports.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
        (folder / "token").write_text("2\n")
        self.send_response(503 if len(reports) in (3, 4) else 200)
        self.end_headers()
        (folder / str(len(reports))).touch()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, for a certificate")
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def train(tmp_path, variables):
    """What two ranks that train print of a TrainJob."""
    results = run_ranks(SCRIPT, 2, tmp_path, env=variables)
    lines = [line for result in results for line in result.stderr.splitlines()]
    return [line for line in lines if "TrainJob" in line]


def test_a_run_reports_its_steps_and_a_refusal_is_mentioned_once(server, tmp_path):
    mentioned = train(tmp_path, {**server.variables, "ACCELERATE_TRAINJOB_EPOCHS": "2"})
    paths, tokens, statuses = zip(*server.reports, strict=True)
    assert set(paths) == {"/namespaces/n/trainjobs/j/status"}
    assert tokens[0] == "Bearer 1" and set(tokens[1:]) == {"Bearer 2"}
    assert [status["progressPercentage"] for status in statuses[:4]] == [12, 25, 37, 50]
    (last,) = {status["progressPercentage"] for status in statuses[-1:]}
    metrics = {metric["name"]: float(metric["value"]) for metric in statuses[-1]["metrics"]}
    assert last == 100 and statuses[-1]["estimatedRemainingSeconds"] == 0
    assert (
        metrics["step"] == 8
        and metrics["epoch"] == 1
        and metrics["loss"] >= 0
        and metrics["step_seconds"] > 0
    )
    (line,) = mentioned
    assert (
        line.startswith("accelerate: ")
        and "503" in line
        and server.variables["KUBEFLOW_TRAINER_SERVER_URL"] in line
    )


def test_a_server_with_another_certificate_gets_no_token(server, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with Server(other) as stranger:
        variables = {**server.variables, "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(other / "ca.crt")}
    for step in range(1, 5):
        (tmp_path / str(step)).touch()
    (line,) = train(tmp_path, variables)
    assert server.reports == stranger.reports == [] and "certificate" in line


@pytest.mark.parametrize(
    "epochs, epoch, batch, batches, percentage, remaining",
    [
        (None, 1, 5, 10, 50, 10),  # of the pass
        ("4", 1, 5, 10, 37, 50),  # of the run
        ("1", 1, 5, 10, 100, 0),  # a run that is longer than announced
        (None, 0, 15, 0, None, None),  # a stream, whose length is not known
    ],
)
def test_the_status_of_a_step(monkeypatch, epochs, epoch, batch, batches, percentage, remaining):
    monkeypatch.setenv("ACCELERATE_TRAINJOB_EPOCHS", epochs or "")
    rest = (math.nan, 0.0, 0.0, math.nan, "", 0.0)
    first = Status(TRAINING, 5, 100.0, 0, 5, batches, *rest)
    reported = first._replace(step=10, time=116.0, batch=10)
    newest = Status(TRAINING, 15, 120.0, epoch, batch, batches, 0.123456789, *rest[1:])
    status = trainer_status(newest, reported, first)
    assert (
        status.get("progressPercentage") == percentage
        and status.get("estimatedRemainingSeconds") == remaining
    )
    assert status["lastUpdatedTime"] == "1970-01-01T00:02:00+00:00"
    values = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert values == {"step": "15", "epoch": str(epoch), "loss": "0.123457", "step_seconds": "0.8"}
    assert "loss" not in {
        metric["name"] for metric in trainer_status(first, first, first)["metrics"]
    }
