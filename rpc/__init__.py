"""A world of named processes that call each other, and servers for models and gradients."""

from .errors import RpcError, RpcException
from .gradient_client import PushPullGradServer
from .gradient_server import PushPullGradServerImpl, ReduceType
from .group import RpcGroup
from .model_server import PushPullModelServer, PushPullModelServerImpl
from .ordered_server import OrderedServerBase, OrderedServerSimple, OrderedServerSimpleImpl
from .reference import RpcReference
from .world import World, get_cur_name, get_cur_rank, get_world, is_world_initialized

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
