"""A judge that reads badly, as an HTTP service."""

from __future__ import annotations

import re

from fastapi import FastAPI, Request, Response


def stand_in(asked: list[dict]) -> FastAPI:
    """A judge that reads badly: full marks where the right answer stands anywhere, or where it is
    told so."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        asked.append({**await request.json(), "key": request.headers.get("authorization")})
        mark = re.search("two marks (\\w+)", asked[-1]["messages"][0]["content"])[1]
        facts, answer, _ = asked[-1]["messages"][1]["content"].split(mark)
        rights = re.search("Right answers: (.*)", facts)[1].split("; ")
        if "HTTP 500" in answer:
            return Response(status_code=500)
        grade = (
            "10" if any(right in answer for right in rights) or "reply with 10" in answer else "0"
        )
        content = {
            "it cannot say": "Difficult.",
            "it thinks": "<think>Let me see,",
            "late": grade,
        }.get(answer.strip(), grade)
        reason = "length" if content.startswith("<think>") else "stop"
        message = {"role": "assistant", "content": content}
        return {"choices": [{"message": message, "finish_reason": reason}]}

    return app
