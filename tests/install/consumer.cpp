#include <tandem/record.h>
#include <tandem/rng.h>

#include <cstring>

int main()
{
    td_record *record = nullptr;
    char *text = nullptr;

    if (td_record_create("install", "base", "c", &record) != TD_OK || td_record_text(record, &text) != TD_OK)
        return 1;
    const bool named = std::strstr(text, "\"deliverable\":\"install\"") != nullptr;
    td_record_text_free(text);
    td_record_destroy(record);
    return named && td_record_create("", "base", "c", &record) == TD_BAD_ARGUMENT &&
                   std::strstr(td_last_error(), "deliverable") != nullptr
               ? 0
               : 1;
}
