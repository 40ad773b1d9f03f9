"""A small graph and a small plan, as JSON data."""

VALUES = {
    "params": {"shape": [4, 2], "dtype": "float32", "bytes": 32, "axis": None},
    "rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "loop/in.rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "loop/out.rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "rows'": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "sum": {"shape": [3], "dtype": "float32", "bytes": 12, "axis": None},
    "params'": {"shape": [4, 2], "dtype": "float32", "bytes": 32, "axis": None},
}


def stage(name, per, reads, writes):
    kind = {"kind": "stage", "name": name, "stage": name.split("/")[-1], "per": per, "host": False}
    return {**kind, "reads": reads, "writes": writes, "source": f"mine.py:{len(name)}"}


def example_graph(move="move", fit="fit"):
    inner = stage(f"loop/{move}", "env", ["loop/in.rows", "params"], ["loop/out.rows"])
    body = {"inputs": ["loop/in.rows"], "outputs": ["loop/out.rows"], "nodes": [inner]}
    loop = {"kind": "loop", "name": "loop", "length": 5, "body": body, "source": "mine.py:7"}
    loop |= {"reads": ["rows", "params"], "writes": ["rows'"]}
    glue = {"kind": "glue", "name": "sum", "op": "sum", "reads": ["rows'"], "writes": ["sum"]}
    fits = stage(fit, "batch", ["params", "sum"], ["params'"])
    graph = {"inputs": ["params", "rows"], "outputs": ["params'", "rows'"]}
    return graph | {"title": "Mine", "envs": 8, "values": VALUES, "nodes": [loop, glue, fits]}


def example_plan(mover="mover", fitter="fitter"):
    graph = example_graph()
    fragments = [
        {"name": mover, "replicas": 4, "places": [f"host0/cpu:{i}" for i in range(4)]},
        {"name": fitter, "replicas": 1, "places": ["host0/gpu:0"]},
    ]
    fragments = [{**fragment, "one_program": False} for fragment in fragments]
    flow = {"times": 1, "flow": "lockstep", "bytes": 12}
    channels = [
        {
            "name": "a",
            "writer": mover,
            "reader": fitter,
            "values": ["sum"],
            "kind": "gather of 4",
            **flow,
        },
        {
            "name": "b",
            "writer": fitter,
            "reader": mover,
            "values": ["params"],
            "kind": "broadcast to 4",
            **flow,
        },
    ]
    homes = {"loop": [mover], "sum": [fitter], "fit": [fitter]}
    plan = {"distribution": "mine", "graph": graph, "fragments": fragments, "channels": channels}
    return plan | {"homes": homes, "owners": {"params": fitter, "rows": mover}}
