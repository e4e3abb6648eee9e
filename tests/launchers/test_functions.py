# SPDX-License-Identifier: Apache-2.0
"""notebook_launcher and debug_launcher: functions in forked processes that work together."""

from ranks import run_ranks


def test_functions_run_on_ranks_that_cooperate():
    run_ranks(
        """
        import os, signal, sys
        from accelerate import debug_launcher, notebook_launcher
        from accelerate.core.errors import LaunchError
        from accelerate.launchers import PrepareForLaunch, is_port_in_use

        def train(folder, what="sum"):
            import torch
            from accelerate.state import PartialState
            state = PartialState()
            state.destroy_process_group()  # as end_training does: the group stays for the function's next Accelerator
            total = torch.tensor(float(state.process_index + 1))
            if state.num_processes > 1:
                torch.distributed.all_reduce(total)
            if what == "fail" and state.process_index == 1:
                raise ValueError("its own error")
            if what == "kill" and state.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if what != "sum":
                for _ in range(100000):
                    torch.distributed.all_reduce(total)
            precision = os.environ["ACCELERATE_MIXED_PRECISION"]
            name = f"{state.process_index}-{state.num_processes}-{total.item()}-{precision}"
            open(os.path.join(folder, name), "w").close()

        def written(launch, *args, **options):
            import tempfile
            with tempfile.TemporaryDirectory() as folder:
                launch(train, (folder, *args), **options)
                return sorted(os.listdir(folder))

        assert written(debug_launcher) == ["0-2-3.0-no", "1-2-3.0-no"]
        assert "torch.distributed" not in sys.modules or "accelerate.state" not in sys.modules
        import torch  # as in most notebooks; the processes that are forked from here need not import it
        assert written(notebook_launcher, num_processes=2, mixed_precision="bf16") == ["0-2-3.0-bf16", "1-2-3.0-bf16"]
        assert "accelerate.state" not in sys.modules
        for what, told in (("fail", "ValueError: its own error"), ("kill", "SIGKILL")):
            try:
                written(debug_launcher, what)
            except LaunchError as error:
                assert "rank 1 failed" in str(error) and told in str(error), error
            else:
                raise AssertionError("no error")
        def value(size):
            import sys, time
            rank = int(os.environ["RANK"])
            sys.stdout.write("one\\n\\rbar")
            sys.stdout.flush()
            print(" of", rank)
            if size < 0 and rank:
                raise ValueError("its own error")
            return rank, "x" * size

        import contextlib, io, re, tempfile
        with tempfile.TemporaryFile("w+") as file, contextlib.redirect_stdout(file):
            values = notebook_launcher(value, (1 << 20,), num_processes=2, return_values=True)
            assert notebook_launcher(value, (1,), num_processes=2) is None
            file.seek(0)
            text = file.read()
        assert values == [(0, "x" * (1 << 20)), (1, "x" * (1 << 20))]
        assert text.count("[rank 1] one\\n") == 2 and text.count("[rank 1] bar of 1\\n") == 2, text
        assert "[rank 0]" not in text and text.count("one\\n") == 4, text
        try:
            notebook_launcher(value, (-1,), num_processes=2, return_values=True)
        except LaunchError as error:
            assert "rank 1 failed: ValueError: its own error" in str(error), error
        else:
            raise AssertionError("no error")
        elastic = {"return_values": True, "max_restarts": 1}
        for wrong in (elastic, {"mixed_precision": "bf6"}, {"num_processes": 0}, {"node_rank": 1}):
            try:
                notebook_launcher(train, (".",), **wrong)
            except ValueError:
                continue
            raise AssertionError(wrong)
        assert written(notebook_launcher, num_processes=1) == ["0-1-1.0-no"]
        try:
            notebook_launcher(train, (".",), num_processes=2)
        except ValueError as error:
            assert "inside the launched function" in str(error)
        else:
            raise AssertionError("the parent's state was overlooked")
        seen = []
        PrepareForLaunch(lambda *args: seen.append((os.environ["RANK"], os.environ["LOCAL_RANK"], args)))(3, "x")
        assert seen == [("3", "3", ("x",))]
        assert not is_port_in_use(1)
        """,
        1,
        fresh=True,
    )
