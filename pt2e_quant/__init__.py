"""A quantization compiler for torch.export graphs."""

from pt2e_quant import backends
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import Pt2eQuantError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.archive.program import load, save
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.causal_lm import export_causal_lm
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.convert.to_integer_reference import to_integer_reference
from pt2e_quant.flow.encodings.export_file import export_encodings
from pt2e_quant.flow.encodings.import_file import import_encodings
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.flow.qat.qat_schedule import QatSchedule
from pt2e_quant.one_call import quantize

__all__ = [
    "Pt2eQuantError",
    "QatSchedule",
    "backends",
    "calibrate",
    "convert_pt2e",
    "export_causal_lm",
    "export_encodings",
    "import_encodings",
    "load",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "provenance_of",
    "quantize",
    "save",
    "sqnr_db",
    "to_integer_reference",
    "verify_canonical",
]
