"""Reading a listing and finding its loop, on listings written by hand."""

import pytest

from benchmarks.kernels.ahead_of_time.disassemble import main_loop, read_listing

LISTING = """
        code for sm_90a
                Function : int8_linear_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000e700000000800 */
        /*0010*/             @!P4  BRA 0x90 ;                          /* 0x0000000c006cc947 */
        /*0020*/                   LDG.E R8, desc[UR14][R16.64] ;
        /*0030*/              @!P6 LDGSTS.E.BYPASS.128 [R109], desc[UR14][R20.64], P6 ;
        /*0040*/                   IGMMA.64x128x32.S8.S8 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/              @!P2 BRA 0x50 ;
        /*0060*/            @!UP0  UTMALDG.2D [UR8], [UR4] ;
        /*0070*/                   IADD3 R1, R1, 0x10, RZ ;
        /*0080*/              @!P4 BRA 0x20 ;
        /*0090*/                   STG.E.128 desc[UR14][R2.64], R4 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
        /*00c0*/                   NOP;
"""


def test_read_listing_when_given_a_listing_then_reads_every_instruction_and_branch():
    found = read_listing(LISTING)
    assert [i.address for i in found] == list(range(0, 0xD0, 0x10))
    assert [(i.address, i.target) for i in found if i.target is not None] == [
        (0x10, 0x90),
        (0x50, 0x50),
        (0x80, 0x20),
        (0xB0, 0xB0),
    ]


@pytest.mark.parametrize(
    ("opcode", "is_load", "is_wide", "is_matrix"),
    [
        ("LDG.E", True, False, False),
        ("LDG.E.128", True, True, False),
        ("LDGSTS.E.BYPASS.128", True, True, False),
        ("LDGSTS.E.64", True, False, False),
        ("UTMALDG.2D", True, True, False),
        ("LDGDEPBAR", False, False, False),
        ("STG.E.128", False, True, False),
        ("LDS.128", False, True, False),
        ("IMMA.16832.S8.S8.SAT", False, False, True),
        ("IGMMA.64x128x32.S8.S8", False, False, True),
        ("HGMMA.64x16x16.F32.BF16", False, False, True),
        ("QMMA.16832.F32.E4M3.E4M3", False, False, True),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", False, False, True),
        ("UTCHMMA", False, False, True),
        ("IMAD.MOV.U32", False, False, False),
        ("HFMA2.MMA", False, False, False),
    ],
)
def test_read_listing_when_given_an_opcode_then_tells_its_kind(opcode, is_load, is_wide, is_matrix):
    (found,) = read_listing(f"/*0000*/ {opcode} R1, R2 ;")
    assert found.opcode == opcode
    assert (found.is_global_load, found.is_wide, found.is_matrix) == (is_load, is_wide, is_matrix)


def test_main_loop_when_products_surround_a_wait_loop_then_finds_the_loop_of_products():
    loop = main_loop(read_listing(LISTING))
    assert [i.address for i in loop] == list(range(0x20, 0x90, 0x10))


def test_main_loop_when_there_are_two_loops_then_takes_the_one_with_more_products():
    text = """
        /*0000*/ HMMA.16816.F32 R1 ;
        /*0010*/ BRA 0x0 ;
        /*0020*/ HMMA.16816.F32 R1 ;
        /*0030*/ HMMA.16816.F32 R1 ;
        /*0040*/ BRA 0x20 ;
    """
    assert [i.address for i in main_loop(read_listing(text))] == [0x20, 0x30, 0x40]


def test_main_loop_when_loops_are_nested_then_takes_the_inner():
    text = """
        /*0000*/ HMMA.16816.F32 R1 ;
        /*0010*/ HMMA.16816.F32 R1 ;
        /*0020*/ BRA 0x10 ;
        /*0030*/ HMMA.16816.F32 R1 ;
        /*0040*/ BRA 0x0 ;
    """
    assert [i.address for i in main_loop(read_listing(text))] == [0x10, 0x20]


def test_main_loop_when_there_are_no_products_then_takes_the_loop_that_loads():
    text = """
        /*0000*/ FADD R1 ;
        /*0010*/ BRA 0x0 ;
        /*0020*/ LDG.E.128 R1 ;
        /*0030*/ BRA 0x20 ;
    """
    assert [i.address for i in main_loop(read_listing(text))] == [0x20, 0x30]


def test_main_loop_when_there_is_no_loop_then_takes_everything_but_padding():
    text = "/*0000*/ LDG.E.128 R1 ;\n/*0010*/ EXIT ;\n/*0020*/ BRA 0x20 ;\n/*0030*/ NOP ;"
    assert [i.opcode for i in main_loop(read_listing(text))] == ["LDG.E.128", "EXIT", "BRA"]
