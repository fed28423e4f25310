"""What torch's schemas say of operators."""

import torch

from pt2e_quant.graph.ops import is_in_place, out_of_place

aten = torch.ops.aten


def test_out_of_place_when_of_any_operator_then_takes_the_same_arguments():
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace != "aten" or not name.endswith("_") or name.startswith("_"):
            continue
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            twin = out_of_place(target)
            if twin is None or not is_in_place(target):
                continue
            found[target] = twin
            kinds = [[str(a.type) for a in t._schema.arguments] for t in (target, twin)]
            assert kinds[0] == kinds[1]
            assert not is_in_place(twin)
    assert len(found) > 200
    assert found[aten.pow_.Scalar] is aten.pow.Tensor_Scalar
    assert found[aten.relu_.default] is aten.relu.default
