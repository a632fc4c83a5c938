"""How the keeping of answers is set up. Needs a database, so only what runs a router for others imports it."""

import router_svc.responses.service
from router_svc.responses.config import ResponseLimits
from router_svc.responses.service import ResponseService
from weft.host.config import WeftConfig
from weft.host.home import WeftHome


def response_service(config: WeftConfig, home: WeftHome) -> ResponseService:
    """The keeping of answers, in the router's database."""
    section = config.router
    url = section.database_url or f"sqlite+aiosqlite:///{home.state / 'router.db'}"
    return router_svc.responses.service.build(url, ResponseLimits(**section.responses.model_dump()))
