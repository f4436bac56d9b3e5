"""Run PyTorch's own tests of torch.distributed.rpc, which ship inside the torch wheel, on the backend CONVOY.

    python rpc_run.py -v ConvoyRpcTest.test_add ...

`make test-pytorch-rpc` runs all of them (rpc_suite.py), ctest a few. BACKEND=TENSORPIPE runs the peer itself.
No file of torch is edited. Workers are forked from a server
that has imported this file and used nothing of it: importing takes each of them seconds otherwise.
"""
import importlib.util
import json
import os
import sys
import types
import unittest

NAME = os.environ.setdefault("BACKEND", "CONVOY")

if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    stub = types.ModuleType("expecttest")  # torch's harness needs only a base class and a flag of it
    stub.ACCEPT, stub.TestCase = False, unittest.TestCase
    sys.modules["expecttest"] = stub

import torch  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402

import convoy  # noqa: E402, F401: registers the backend
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed import rpc_utils  # noqa: E402
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture  # noqa: E402


class Fixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self):
        return rpc.BackendType[NAME]

    @property
    def rpc_backend_options(self):
        return rpc.backend_registry.construct_rpc_backend_options(self.rpc_backend, init_method=self.init_method)

    def get_shutdown_error_regex(self):
        return ".*"  # as torch's own fixtures have it

    def get_timeout_error_regex(self):
        return "RPC ran for more than"


def run_with(environment, target, args, kwargs):
    """The server's environment is older than the test's."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


def set_up(self):
    MultiProcessTestCase.setUp(self)
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch._dynamo"])

    def process(target, name, args, kwargs):
        return context.Process(target=run_with, name=name, args=(dict(os.environ), target, args, kwargs))

    self._start_processes(process)


rpc_utils.SpawnHelper.setUp = set_up
rpc_utils.SpawnHelper.tearDown = MultiProcessTestCase.tearDown
globals().update(rpc_utils.generate_tests("Convoy", Fixture, rpc_utils.GENERIC_TESTS, __name__))


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        tests = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
        print("\n".join(sorted(test.id().partition(".")[2] for group in tests for test in group)))
        sys.exit()
    result = unittest.main(exit=False).result
    if "RESULTS" in os.environ:

        def names(tests):
            return sorted({test.id().partition(".")[2] for test, _ in tests})

        with open(os.environ["RESULTS"], "w") as file:
            json.dump({"ran": result.testsRun, "failed": names(result.failures + result.errors),
                       "skipped": names(result.skipped)}, file)
    sys.exit(not result.wasSuccessful())
