#include <tandem/dtype.h>
#include <tandem/rng.h>

#include <cstring>

int main()
{
    const td_rng rng = {.seed = 1, .stream = 2};
    float number = 0;

    return td_rng_normal(&rng, 0, 1, 0, 1, &number) == TD_OK && number != 0 &&
                   td_rng_normal(&rng, 0, 1, 0, 1, nullptr) == TD_BAD_ARGUMENT &&
                   std::strstr(td_last_error(), "out") != nullptr
               ? 0
               : 1;
}
