def plan_text(plan):
    out=[]
    for f in plan.distribution.fragments:
        out.append(f"{f.name} x{f.replicas} {'(one program)' if plan.one_program(f.name) else ''} {plan.places[f.name]}")
        out.append(f"   {plan.programs[f.name]}")
    for c in plan.channels:
        out.append(f"{c.name} {c.values} scope={c.scope!r} times={c.times} {c.flow} {plan.bytes_of(c)}")
    return "\n".join(out)
