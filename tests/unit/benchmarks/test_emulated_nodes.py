"""Links between emulated nodes (benchmarks/emulated_nodes.py)."""

from emulated_nodes import bucket_bytes


def test_the_bucket_holds_a_segment_and_the_headers_of_its_packets():
    for gbit_s in [step / 100 for step in range(1, 1001)]:
        segment, bucket = bucket_bytes(gbit_s)
        packets = -(-segment // 1448)
        assert segment + packets * 66 <= bucket
        # What passes without taking time stays below 0.5 ms of the link, or a segment with its headers.
        assert bucket <= max(gbit_s * 1e9 / 8 * 0.5e-3, 16_384 * 1.05) + 2_100
