"""How what a router keeps is set up. Needs a database, so only what runs a router for others imports it."""

import router_svc.durable.responses.service
from router_svc.durable.responses.service import ResponseService
from router_svc.store.database import RouterDatabase
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig


def router_database(config: WeftConfig, home: WeftHome) -> RouterDatabase:
    """What outlives the router; not open yet."""
    url = config.router.database_url or f"sqlite+aiosqlite:///{home.state / 'router.db'}"
    return RouterDatabase(url, promise_file=home.promises)


def response_service(config: WeftConfig, database: RouterDatabase) -> ResponseService:
    """The keeping of answers, in the router's database."""
    return router_svc.durable.responses.service.build(database, config.router.responses)
