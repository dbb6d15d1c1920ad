"""A real courier whose process dies at its n-th store call, before or after the call took effect.

Arguments: n (0: it lives), ``before`` or ``after``. The rest is told by the environment, as to any courier. It writes the number of calls that
it has made so far into the file ``calls`` of its folder, so that whoever kills it knows how many there are to die at.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Literal, NoReturn, cast

from torchrelay.state.courier import Courier
from torchrelay.state.request import GenerationRequest
from torchrelay.store import open_store
from torchrelay.testing.faulty_store import FaultyStore


def _die() -> NoReturn:
    """End the process as the kernel would, from whatever thread this is."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("not reached")


def main(die_at: int, effect: Literal["before", "after"]) -> None:
    """Serve rank 0 until it has gone."""
    folder = Path(os.environ["TORCHRELAY_WORKDIR"])
    request = GenerationRequest.read(folder)
    store = FaultyStore(open_store(request.store_url), fail_at=die_at or None, effect=effect, error=_die)
    path = folder / "courier-0.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(2)
        courier = Courier(request, store=store, folder=folder, rank=0, local_ranks=1)
        signal.signal(signal.SIGTERM, lambda *_: courier.dismiss())
        courier.serve(listener)
    (folder / "calls").write_text("\n".join(store.log))


if __name__ == "__main__":
    main(int(sys.argv[1]), cast(Literal["before", "after"], sys.argv[2]))
