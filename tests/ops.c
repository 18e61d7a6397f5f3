#include "support/ops_kit.h"

int main(void)
{
    int failed = 0;

    ops_open("cpu");
    failed += ops_exp_group();
    failed += ops_gemm_group();
    failed += ops_layout_group();
    failed += ops_gate_group();
    failed += ops_rmsnorm_group();
    failed += ops_softmax_group();
    failed += ops_cross_entropy_group();
    failed += ops_optimizers_group();
    td_device_close(ops_dev);
    return failed != 0;
}
