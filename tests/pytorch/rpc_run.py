"""Run PyTorch's own tests of torch.distributed.rpc, which ship inside the torch wheel, on the backend CONVOY.

    python rpc_run.py -v ConvoyRpcTest.test_add ...

`make test-pytorch-rpc` runs all of them (rpc_suite.py), ctest a few. BACKEND=TENSORPIPE runs the peer itself. SMART=1:
with convoy.rpc.use_smart_backward(). Classes ConvoyFaulty... are those that torch has for its faulty agent.
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
# Tests of DDP call each other as soon as their own process group is there; torch does not wait for the others' by itself.
os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")

if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    stub = types.ModuleType("expecttest")  # torch's harness needs only a base class and a flag of it
    stub.ACCEPT, stub.TestCase = False, unittest.TestCase
    sys.modules["expecttest"] = stub

import torch  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402

import convoy  # noqa: E402, F401: registers the backend
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed import rpc_utils  # noqa: E402
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture  # noqa: E402
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture  # noqa: E402

if os.environ.get("SMART"):
    convoy.rpc.use_smart_backward()


class Fixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self):
        return rpc.backend_registry.BackendType[NAME]

    @property
    def rpc_backend_options(self):
        return rpc.backend_registry.construct_rpc_backend_options(self.rpc_backend, init_method=self.init_method)

    def get_shutdown_error_regex(self):
        return ".*"  # as torch's own fixtures have it

    def get_timeout_error_regex(self):
        return "RPC ran for more than"


def make_faulty_options(rpc_timeout, init_method, num_worker_threads, messages_to_fail, messages_to_delay, num_fail_sends):
    options = convoy.rpc.ConvoyRpcBackendOptions(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout,
                                                 init_method=init_method)
    options.messages_to_fail, options.num_fail_sends = messages_to_fail, num_fail_sends
    options.messages_to_delay = messages_to_delay
    return options


def init_faulty(store, name, rank, world_size, rpc_backend_options):
    agent = convoy._torch_rpc.init(store, name, rank, world_size, rpc_backend_options)
    agent.set_faults(rpc_backend_options.messages_to_fail, rpc_backend_options.num_fail_sends,
                     rpc_backend_options.messages_to_delay)
    agent.sync()  # so that all have set theirs
    return agent


rpc.backend_registry.register_backend("FAULTY_CONVOY", make_faulty_options, init_faulty)


class FaultyFixture(FaultyRpcAgentTestFixture):
    @property
    def rpc_backend(self):
        return rpc.backend_registry.BackendType["FAULTY_CONVOY"]


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
globals().update(rpc_utils.generate_tests("Convoy", FaultyFixture, rpc_utils.FAULTY_AGENT_TESTS, __name__))


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
