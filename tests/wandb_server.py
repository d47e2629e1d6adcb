"""A server on loopback that speaks as much of W&B's protocol as ``wandb sync`` and dashboards need."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Attributes: ``operations`` (name, variables) of every GraphQL request; ``streams``: run id -> file name -> lines
    of its file stream; ``files``: path -> bytes of every upload."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.streams: dict[str, dict[str, dict[int, str]]] = {}
        self.files: dict[str, bytes] = {}
        self.unknown: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.startswith("/graphql"):
                    self._answer({"data": server.graphql(json.loads(body), self.headers)})
                elif self.path.endswith("/file_stream"):
                    server.stream(self.path.split("/")[-2], json.loads(body))
                    self._answer({"exitcode": None, "limits": {}})
                else:
                    self._answer({})

            def do_PUT(self) -> None:
                server.files[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def _answer(self, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def named(self, name: str) -> list[dict[str, Any]]:
        """Variables of every request of one operation, in order."""
        return [variables for operation, variables in self.operations if operation == name]

    def history(self, run_id: str) -> list[dict[str, Any]]:
        lines = self.streams[run_id].get("wandb-history.jsonl", {})
        return [json.loads(lines[index]) for index in sorted(lines)]

    def summary(self, run_id: str) -> dict[str, Any]:
        lines = self.streams[run_id]["wandb-summary.json"]
        return dict(json.loads(lines[max(lines)]))

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        for name, part in (body.get("files") or {}).items():
            lines = self.streams.setdefault(run_id, {}).setdefault(name, {})
            for index, line in enumerate(part["content"], start=part["offset"]):
                lines[index] = line

    def graphql(self, request: dict[str, Any], headers: Any) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found[1] if found else ""
        self.operations.append((name, variables))
        entity = {"id": "e", "name": "team", "__typename": "Entity"}
        project = {"id": "p", "name": "ckptplan", "entity": entity, "entityName": "team", "internalId": "1"}
        edges = {"edges": [], "pageInfo": {"hasNextPage": False, "endCursor": None}}
        if name == "UpsertBucket":
            run = {
                "id": base64.b64encode(f"Run:v1:{variables['name']}".encode()).decode(),
                "name": variables["name"],
                "displayName": variables.get("displayName"),
                "description": None,
                "config": variables.get("config"),
                "sweepName": None,
                "project": project,
                "historyLineCount": 0,
            }
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if name == "CreateRunFiles":
            files = [
                {"name": file, "uploadUrl": f"{self.address}/put/{variables['run']}/{file}"}
                for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name == "CreateArtifact":
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if name.lower().startswith("upsertview") or "upsertView" in query:
            view = {"id": f"view{len(self.operations)}", "name": variables.get("name"), "type": variables.get("type")}
            view |= {"displayName": variables.get("displayName"), "description": "", "spec": variables.get("spec")}
            view |= {"project": project, "createdAt": "2026-11-30T00:00:00", "updatedAt": "2026-11-30T00:00:00"}
            return {"upsertView": {"view": view, "inserted": True}}
        answers: dict[str, Any] = {
            "viewer": {
                "id": "u",
                "entity": "team",
                "username": "u",
                "flags": "{}",
                "teams": {"edges": []},
                "admin": False,
            },
            "serverInfo": {
                "cliVersionInfo": {"max_cli_version": "99.0.0"},
                "features": [],
                "latestLocalVersionInfo": None,
            },
            "model": {"bucket": None, **project},
            "project": project | {"allViews": {"edges": []}, "runs": edges},
            "models": edges,
            "entity": entity | {"projects": edges},
        }
        return answers
