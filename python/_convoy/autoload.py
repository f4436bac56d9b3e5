"""Makes torch.distributed know the backend "convoy" without loading it.

torch calls register() at the end of its own import, in every program, whether it uses convoy or not:
it must be quick, and must not raise.
"""

import logging


def register() -> None:
    try:
        _register()
    except Exception:  # an exception here would break `import torch`
        logging.getLogger("convoy").warning("convoy could not be registered", exc_info=True)


def _register() -> None:
    import torch.distributed as dist

    # A torch built without distributed support has nothing to register with.
    if not dist.is_available() or "CONVOY" in dist.Backend._plugins:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler("convoy", _meet)
    # A list: of a string, torch would take the letters for devices.
    dist.Backend.register_backend("convoy", _create, extended_api=True, devices=["cpu"])


def _create(options, pg_options):
    from convoy import _groups

    return _groups.create_for_torch(options, pg_options)


def _meet(url, **arguments):
    from convoy import _groups

    return _groups.meet(url, **arguments)
