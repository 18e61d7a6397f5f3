#include "ops_kit.h"

int main(void)
{
    int failed = 0;

    if (td_device_open("cpu", &ops_cpu) != TD_OK) {
        fprintf(stderr, "cpu: %s\n", td_last_error());
        return 1;
    }
    failed += ops_exp_group();
    failed += ops_gemm_group();
    failed += ops_layout_group();
    failed += ops_gate_group();
    failed += ops_rmsnorm_group();
    failed += ops_softmax_group();
    failed += ops_cross_entropy_group();
    failed += ops_optimizers_group();
    failed += ops_refusals_group();
    td_device_close(ops_cpu);
    return failed != 0;
}
