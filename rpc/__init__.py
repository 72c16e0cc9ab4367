"""Named processes that call each other, and servers for models and gradients."""

from .calls.group import RpcGroup
from .calls.reference import RpcReference
from .errors import RpcError, RpcException
from .servers.gradient_client import PushPullGradServer
from .servers.gradient_server import PushPullGradServerImpl, ReduceType
from .servers.model_server import PushPullModelServer, PushPullModelServerImpl
from .servers.ordered_server import OrderedServerBase, OrderedServerSimple, OrderedServerSimpleImpl
from .world.world import World, get_cur_name, get_cur_rank, get_world, is_world_initialized

__all__ = [
    "OrderedServerBase",
    "OrderedServerSimple",
    "OrderedServerSimpleImpl",
    "PushPullGradServer",
    "PushPullGradServerImpl",
    "PushPullModelServer",
    "PushPullModelServerImpl",
    "ReduceType",
    "RpcError",
    "RpcException",
    "RpcGroup",
    "RpcReference",
    "World",
    "get_cur_name",
    "get_cur_rank",
    "get_world",
    "is_world_initialized",
]
