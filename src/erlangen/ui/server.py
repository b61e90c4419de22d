"""Serve the page on this machine alone."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field

import uvicorn

from erlangen.ui.app import make_app
from erlangen.ui.runs import Runs

ADDRESS = "127.0.0.1"


@dataclass
class Server:
    """A server over the runs below ``folder``. The port is taken at once, so that ``url`` is known before it runs."""

    folder: str | os.PathLike[str]
    port: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((ADDRESS, self.port))
            self._socket.listen()  # who opens the address before the server runs waits, and is not refused
        except OSError as error:
            self._socket.close()
            raise ValueError(
                f"port is {self.port}, which cannot be had ({error.strerror}); choose another --port"
            ) from error
        self.port = self._socket.getsockname()[1]
        # no access log: it would hold the token
        settings = uvicorn.Config(
            make_app(Runs(self.folder), self.token),
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
        )
        self._server = uvicorn.Server(settings)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def run(self) -> None:
        """Until Ctrl-C or `stop`."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
