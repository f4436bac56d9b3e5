"""Makes torch.distributed know the backend "convoy" without loading it.

torch calls register() at the end of its own import, in every program, whether it uses convoy or not:
it must be quick, and must not raise.
"""

import logging
import os

_log = logging.getLogger("convoy")


def register() -> None:
    try:
        _register()
    except Exception:  # an exception here would break `import torch`
        _log.warning("convoy could not be registered", exc_info=True)


def _register() -> None:
    import torch.distributed as dist

    # A torch built without distributed support has nothing to register with.
    if not dist.is_available() or "CONVOY" in dist.Backend._plugins:
        return
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    register_rendezvous_handler("convoy", _meet)
    if "CONVOY_RENDEZVOUS" in os.environ:
        # Under `convoy run` the default meets through its store too. torch refuses to register a
        # scheme a second time, so the handler is put in the place of torch's.
        _rendezvous_handlers["env"] = _meet_by_environment(_rendezvous_handlers["env"])
    # A list: of a string, torch would take the letters for devices.
    dist.Backend.register_backend("convoy", _create, extended_api=True, devices=["cpu"])
    import torch.distributed.rpc  # torch itself has loaded it

    if torch.distributed.rpc.is_available():
        from _convoy import torch_rpc

        torch_rpc.register()


def _create(options, pg_options):
    from convoy import _groups

    return _groups.create_for_torch(options, pg_options)


def _meet(url, **arguments):
    from convoy import _groups

    return _groups.meet(url, **arguments)


def _meet_by_environment(torchs):
    """env:// of a rank of `convoy run`: the launcher's store, and no TCP port.

    The launcher's store knows the ranks of the job as the launcher has numbered them. A program that
    has changed one of the variables, or asks for another rank or size, means something else (its own
    children, torchrun below us): `torchs` is torch's handler, which serves that as ever.
    """
    def meet(url, **arguments):
        from urllib.parse import parse_qsl, urlparse

        asked = dict(parse_qsl(urlparse(url).query))
        found = {name: asked.get(name, os.environ.get(name.upper())) for name in ("rank", "world_size")}
        place = (f"{found['rank']}/{found['world_size']}@{os.environ.get('MASTER_ADDR')}:"
                 f"{os.environ.get('MASTER_PORT')}")
        if place == os.environ.get("CONVOY_RENDEZVOUS"):
            try:
                from convoy import _C

                _C.launcher_store()
                return _meet(url, **arguments)
            except Exception as error:
                _log.warning("env:// meets through torch's TCPStore on port %s, not through the store of "
                             "`convoy run`: %s", os.environ.get("MASTER_PORT"), error)
        return torchs(url, **arguments)

    return meet
